import pytest

from specbench.system.secrets import without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/q.jsonl?token=abc&x=1", "https://host/q.jsonl?***"),
        ("https://s3.host/q?X-Amz-Signature=ab12&X-Amz-Date=1", "https://s3.host/q?***"),
        ("https://host/q#access_token=abc", "https://host/q#***"),
        ("https://TOKEN@host/q", "https://***@host/q"),
        ("https://user:p@w@host/q", "https://***@host/q"),
        ("see https://user:p/w@host:8/q?a=b for more", "see https://***@host:8/q?*** for more"),
        ("https://user:p?w@host/q", "https://***"),
        ("https://host/q?token=a@b", "https://***"),
        ("https://host:8080/data/q.jsonl", "https://host:8080/data/q.jsonl"),
        ("Authorization: Bearer abc.def-1", "Authorization: ***"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: ***"),
        ("a basic question, to the point", "a basic question, to the point"),
        *((f"x {key} y", "x *** y") for key in (
            "glpat-abcdefghij0123456789", "xoxb-1234567890-abcdef", "xoxp-1234567890-abcdef", "AIza" + "a1B2-_" * 6,
            "hf_" + "a1B2" * 8, "ghp_" + "a1B2" * 9, "gho_" + "a1B2" * 9, "sk-" + "a1B2" * 8, "AKIA" + "ABCD" * 4,
            "ASIA" + "ABCD" * 4, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmN",
        )),
        ("hf_generate_tokens_per_second", "hf_generate_tokens_per_second"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_blanked(text, shown):
    assert without_secrets({"note": [text]}) == {"note": [shown]}


def test_what_is_named_like_a_secret_is_blanked():
    secret = (
        *(
            "key",
            "api_key",
            "apiKey",
            "secret_key",
            "private_key",
            "X-Amz-Signature",
            "auth",
            "Authorization",
        ),
        *("bearer", "token", "hf_token", "accessToken", "password", "client_secret", "credentials"),
    )
    harmless = (
        *("tokenizer", "max_new_tokens", "monkey", "keys", "token_budget", "author", "tokens", "keyboard"),
        *("max_draft_tokens", "signatures", "same_added_tokens"),
    )
    shown = without_secrets(dict.fromkeys((*secret, *harmless), "x"))
    assert shown == dict.fromkeys(secret, "***") | dict.fromkeys(harmless, "x")
    assert without_secrets({"password": 1234, "auth": {"a": "b"}, "token": None, "key": True}) == {
        "password": "***", "auth": "***", "token": None, "key": True
    }  # fmt: skip
