"""Keys, tokens and passwords are recognized by argument names and by form, without false positives."""

import pytest
from costs import costs_less_than

from forge_agents.credentials import HIDDEN, is_secret, is_secret_variable, redact, redact_command


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "OPENAI_API_KEY", "X-Api-Key", "token", "github_token", "Authorization", "client_secret",
     "passphrase", "db_password", "pwd", "credentials", "session_cookie", "aws_secret_access_key"],
)  # fmt: skip
def test_argument_with_a_name_of_credentials_is_secret(name):
    assert is_secret(name, "abc") and is_secret(name, ["abc"]) and not is_secret(name, "")


def test_variables_whose_last_word_has_no_separator_are_secret():
    secret = "DBPASS MAILPASS ROOTPW LDAP_BINDPW PGPASSFILE GH_BEARER MNEMONIC SEED_PHRASE WALLET_SEED SSHPASS"
    harmless = "BYPASS COMPASS PYTHONHASHSEED PASSES SEED PWD MAXPWM"
    assert all(map(is_secret_variable, secret.split())) and not any(map(is_secret_variable, harmless.split()))


@pytest.mark.parametrize(
    ("name", "value"),
    [("key", "answer"), ("answer_key", "B"), ("eos_token", "<|im_end|>"), ("max_tokens", 5), ("tokenizer", "gpt2"),
     ("author", "me"), ("secretary", 3), ("api_key_env", "OPENAI_API_KEY"), ("sort_keys", "yes"), ("token", 7)],
)  # fmt: skip
def test_argument_with_another_meaning_is_no_secret(name, value):
    assert not is_secret(name, value)


def test_key_that_looks_generated_is_secret():
    assert is_secret("openai_key", "a1b2c3d4e5f6") and is_secret("key", "0123456789abcdef0123")


@pytest.mark.parametrize(
    "secret",
    ["sk-proj-AbCdEf-Gh1234567890", "sk-ant-api03-AbCdEfGh12", "sk-or-v1-0123456789abcdef", "hf_abcdefghijklmnop",
     "gsk_abcdefgh12345678", "AIzaSyA1234567890abcdefghij", "AKIAIOSFODNN7EXAMPLE", "github_pat_11ABCDEFG0123456789",
     "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdefgh", "xoxb-123456789-abcdef"],
)  # fmt: skip
def test_key_of_a_known_form_is_hidden_within_a_text(secret):
    assert redact(f"curl -H 'x: {secret}' host") == f"curl -H 'x: {HIDDEN}' host"


@pytest.mark.parametrize(
    ("text", "visible_text"),
    [
        ("Authorization: Bearer abcdefghij", f"Authorization: Bearer {HIDDEN}"),
        ("https://me:hunter2@host/x", f"https://{HIDDEN}@host/x"),
        ("https://host/v1?api_key=abc&x=1", f"https://host/v1?api_key={HIDDEN}&x=1"),
        ("--token=abc run", f"--token={HIDDEN} run"),
        ("serve --api-key hunter2 --eos-token x", f"serve --api-key {HIDDEN} --eos-token x"),
        ("at ws://127.0.0.1:8123/0123456789abcdef/ws: no", f"at ws://127.0.0.1:8123/{HIDDEN}/ws: no"),
        ("https://h/openenv/KYnp-euZA5QxYUMwWHKbJEvh1VJuRoZUSaVTr8qWTXRq?x", f"https://h/openenv/{HIDDEN}?x"),
        ("https://hooks.example/T00/B00/Xa3yyyyyyyyyyyyyyyyyyyyy.", f"https://hooks.example/T00/B00/{HIDDEN}."),
        ('{"api_key": "abc"}', f'{{"api_key": "{HIDDEN}"}}'),
        ("a -----BEGIN RSA PRIVATE KEY-----\nMII+/=\n-----END RSA PRIVATE KEY----- (b)", f"a {HIDDEN}(b)"),
    ],
)
def test_credential_after_its_name_is_hidden(text, visible_text):
    assert redact(text) == visible_text


@pytest.mark.parametrize(
    "text",
    ["max_tokens=5", "The token limit holds.", "Say the password: swordfish.", "basic arithmetic", "org/hf_datasets",
     "task-12345678", "http://127.0.0.1:8000/v1", "http://h:8000/chat-completions",
     "https://h/Qwen3-30B-A3B-Instruct-2507/x", "https://h/0e9e39f249a16976918f6564b8830bc894c89659/config.json",
     "risk-12345678", "scikit-learn-1.2.3",
     "-----BEGIN CERTIFICATE-----"],
)  # fmt: skip
def test_ordinary_text_is_left(text):
    assert redact(text) == text


def test_long_texts_are_searched_quickly():
    parts = ("a", "://", "sk-", "eyJ", "token ", "api_key = ", "bearer  ", "://a:", "x@", "http://a:80/", "/a1A")
    for part in (*parts, "--a ", "-"):

        def search(count, part=part):
            redact(part * count)
            redact("http://a:80/" + part.replace("/", "") * count)

        assert costs_less_than(9, search, 40_000, 10_000, slack_s=0.05), f"{part}: 4 times if linear, 16 if quadratic"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PGPASS_PWD", "SSH_AUTH_SOCK", "DOCKER_AUTH_CONFIG",
     "NPM_AUTH", "DATABASE_URL", "TEST_DB_URI", "REDIS_URL", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "XAUTHORITY", "NETRC",
     "AZURE_STORAGE_CONNECTION_STRING", "GPG_AGENT_INFO", "KRB5CCNAME", "GOOGLE_APPLICATION_CREDENTIALS",
     "OP_SESSION_my", "BW_SESSION", "KUBE_CONFIG_DATA", "BASIC_CREDS", "ROOT_PW"],
)  # fmt: skip
def test_credential_variables_are_recognized_by_name(name):
    assert is_secret_variable(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PATH", "KEYBOARD", "PWD", "OLDPWD", "GIT_AUTHOR_NAME", "LS_COLORS",
     "VIRTUAL_ENV", "OPENAI_BASE_URL", "DISPLAY", "AUTHOR", "CONNECTIONS"],
)  # fmt: skip
def test_ordinary_variables_are_no_secrets(name):
    assert not is_secret_variable(name, "/usr/bin:/bin")
    assert not is_secret_variable(name, "http://10.0.0.5:8000/wikipedia-2018-index"), "programs need such addresses"


@pytest.mark.parametrize(
    "value",
    ["sk_live_51H8abcdefgh12345", "SG.abc123def456.ghi789jkl012", "key-0123456789abcdef0123456789abcdef",
     "AccountName=a;AccountKey=abcd1234efgh==;", f"123456789:AA{'x' * 33}", "HRKU-01234567-89ab",
     "ATATT3xFfGF0abcdefg12345",
     "lin_api_abcdefgh12345678", "ntn_123456789abcdef", "figd_abcdef123456", "shpat_0123456789abcdef",
     "pul-0123456789abcdef"],
)  # fmt: skip
def test_keys_of_common_providers_are_recognized(value):
    assert is_secret_variable("SETTING", value) and HIDDEN in redact(f"it is {value} there")


@pytest.mark.parametrize(
    "value",
    ["postgres://me:hunter2@db/x", "redis://:hunter2@cache:6379/0", "https://me:p@ss@proxy:3128", "sk-proj-abc1234567"],
)
def test_variables_are_secrets_by_their_values(value):
    assert is_secret_variable("SETTING", value)
    assert "hunter2" not in redact(value) and "ss@" not in redact(value)


@pytest.mark.parametrize(
    ("words", "visible_text"),
    [
        (["crew", "--api-key", "hunter2"], "crew --api-key '(hidden)'"),
        (["crew", "--api-key=hunter2"], "crew '--api-key=(hidden)'"),
        (["env", "PGPASSWORD=hunter2", "crew"], "env 'PGPASSWORD=(hidden)' crew"),
        (["env", "DOCKER_AUTH_CONFIG={}", "crew"], "env 'DOCKER_AUTH_CONFIG=(hidden)' crew"),
        (["crew", "-H", "Authorization: Bearer hunter2hunter2"], "crew -H 'Authorization: Bearer (hidden)'"),
        (["crew", "postgres://me:hunter2@db"], "crew 'postgres://(hidden)@db'"),
        (["crew", "--secret", "plain words", "--max_tokens", "5"], "crew --secret '(hidden)' --max_tokens 5"),
        (["python", "crew.py", "--model", "qwen", "--seed=3"], "python crew.py --model qwen --seed=3"),
    ],
)
def test_a_command_line_is_shown_without_credentials(words, visible_text):
    assert redact_command(words) == visible_text


def test_a_command_line_is_shown_without_values_of_secret_variables(monkeypatch):
    monkeypatch.setenv("CREW_KEY", "swordfish")
    assert redact_command(["crew", "-k", "swordfish"]) == "crew -k '(hidden)'"
