"""Questions, and benchmark text in what is learnt."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "a placeholder is asked as a question",
        "data",
        "specbench/data/question_files.py",
        "    if placeholder and any(",
        "    if placeholder and not any(",
        ("tests/data/test_questions.py",),
    ),
    Fault(
        "a question inside a longer message is not found",
        "contamination",
        "specbench/data/contamination.py",
        "words[i : i + len(passage)] == passage",
        "words == passage",
        ("tests/methods/test_rest.py", "tests/data/test_warm_start.py"),
    ),
    Fault(
        "only the first turn is looked for",
        "contamination",
        "specbench/data/contamination.py",
        "for text in (*question.texts, *(question.reference or ())):",
        "for text in (*question.texts[:1], *(question.reference or ())):",
        ("tests/methods/test_rest.py", "tests/data/test_warm_start.py"),
    ),
    Fault(
        "eight words of the benchmark are let through",
        "contamination",
        "specbench/data/contamination.py",
        "for words in turns for ngram in ngrams(words, WORDS)}",
        "for words in turns for ngram in ngrams(words, WORDS + 1)}",
        ("tests/data/test_synthesis.py",),
    ),
)
