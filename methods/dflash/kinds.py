"""What joins the tokens of a block: the heads that a drafting model may have, and the method that drafts with each."""

INDEPENDENT, MARKOV, SELECTOR = "independent", "markov", "selector"
METHODS = {INDEPENDENT: "dflash", MARKOV: "dspark", SELECTOR: "dflash2"}
