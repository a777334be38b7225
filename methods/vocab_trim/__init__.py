"""VocabTrim: which tokens a draft head keeps. The trimmed head itself is `methods.common.heads`."""
