"""Plain English: everyday words that take part in the world, and frequent words for the tokenizer."""

from __future__ import annotations

# Nouns of the world. The first block are agents (they act), the second are things.
AGENTS = (
    "baker teacher farmer sailor doctor singer painter king queen soldier merchant miller smith judge "
    "nurse child guard hunter clerk weaver pilot student traveller carpenter potter priest captain cook "
    "gardener thief"
).split()
THINGS = (
    "boat rope net anchor bread oven kettle knife crown letter law seal coin basket scale wagon tree "
    "stone path bird hammer nail bench wheel book pen lesson map curtain song mask stage lamp tunnel ore "
    "shovel flower fence well seed candle bell prayer statue sword drum tent flag bandage bed bottle herb "
    "bridge horse cart mile shelf page scroll chair snow fire coat river house door window garden table "
    "bag box cup plate ring key clock mirror"
).split()
# "base", or "base/past" or "base/past/participle" for irregular verbs.
VERBS = (
    "carry/carried find/found build/built open paint repair sell/sold buy/bought watch clean "
    "hide/hid/hidden count follow lift bring/brought study/studied forget/forgot/forgotten love fear "
    "praise steal/stole/stolen burn cover draw/drew/drawn examine guard fill keep/kept lose/lost mend "
    "move need notice pull push reach save show/showed/shown take/took/taken throw/threw/thrown touch "
    "trade wash weigh visit admire borrow/borrowed break/broke choose/chose describe prepare protect"
).split()
ADJECTIVES = (
    "old new small large red green heavy light broken clean quiet bright dark cold warm round narrow deep "
    "strange plain rich poor sharp soft wet dry young tall famous simple hidden golden wooden grey hollow "
    "empty loud proud gentle silver rough smooth rare common bitter sweet holy secret foreign local"
).split()
ADVERBS = (
    "slowly quickly carefully quietly often always never again twice well badly gladly proudly alone "
    "together early late secretly openly calmly"
).split()

# Frequent words and endings that the world itself hardly uses: prompts from outside stay short in tokens.
FREQUENT = (
    "the of and to a in is it you that he was for on are with as I his they be at one have this from or "
    "had by hot but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make thing "
    "see him two has look more day could go come did my sound no most number who over know water than "
    "call first people may down side been now any new work part take get place made live where after back "
    "little only round man year came show every good me give our under name very through just form much "
    "great think say help low line before turn cause same mean differ move right boy old too does tell "
    "sentence set three want air well also play small end put home read hand port large spell add even "
    "land here must big high such follow act why ask men change went light kind off need house picture "
    "try us again animal point mother world near build self earth father head stand own page should "
    "country found answer school grow study still learn plant cover food sun four thought let keep eye "
    "never last door between city tree cross since hard start might story saw far sea draw left late run "
    "while press close night real life few stop open seem together next white children begin got walk "
    "example ease paper often always music those both mark book letter until mile river car feet care "
    "second group carry took rain eat room friend began idea fish mountain north once base hear horse cut "
    "sure watch color face wood main enough plain girl usual young ready above ever red list though feel "
    "talk bird soon body dog family direct leave song measure state product black short numeral class "
    "wind question happen complete ship area half rock order fire south problem piece told knew pass farm "
    "top whole king size heard best hour better true during hundred remember step early hold west ground "
    "interest reach fast five sing listen six table travel less morning ten simple several vowel toward "
    "war lay against pattern slow center love person money serve appear road map science rule govern pull "
    "cold notice voice fall power town fine certain fly unit lead cry dark machine note wait plan figure "
    "star box noun field rest correct able pound done beauty drive stood contain front teach week final "
    "gave green quick develop sleep warm free minute strong special mind behind clear tail produce fact "
    "street inch lot nothing course stay wheel full force blue object decide surface deep moon island "
    "foot yet busy test record boat common gold possible plane age dry wonder laugh thousand ago ran "
    "check game shape yes miss brought heat snow bed bring sit perhaps fill east weight language among "
    "import return class def self None True False print len range string integer float value index key "
    "result data model system computer program function method process information government company "
    "market business service report research university student teacher health history economic political "
    "social national international public private important different general available because however "
    "although therefore moreover including according without within another something someone everything "
    "anything however whether either rather quite almost already across along around beyond despite "
    "except through into onto million billion percent century period century president minister member "
    "church death birth marriage war peace explain describe summarize translate compare discuss following "
    "provide consider suggest include require allow increase reduce create design support control energy "
    "material structure technology environment climate culture Monday Tuesday Wednesday Thursday Friday "
    "Saturday Sunday January February March April June July August September October November December "
    "America American English British French German Chinese India London Europe"
).split()
ENDINGS = (
    "s es ed ing er est ly ness ment tion ation sion able ible al ial ful less ous ive ize ity ty ism ist "
    "ence ance"
).split()
