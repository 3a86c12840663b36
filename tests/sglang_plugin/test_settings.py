"""Settings of a server, and options of a request."""

import dataclasses

import pytest

from irminsul.errors import InputError
from irminsul.plan import Mode, ReusePolicy
from irminsul.sglang.settings import RequestOptions, Settings, read_request_options, read_settings


def read(text, tmp_path, **environment):
    """Settings from a file and other variables."""
    path = tmp_path / "irminsul.toml"
    path.write_text(text)
    return read_settings({"IRMINSUL_SGLANG_CONFIG": str(path), **environment})


def test_nothing_set_means_the_defaults():
    assert read_settings({}) == Settings()
    assert read_settings({"PATH": "/bin", "SGLANG_PLUGINS": "x", "IRMINSUL_HOME": "/x"}) == Settings()


def test_a_file_sets_everything(tmp_path):
    text = """
    mode = "observe"
    matcher = "winnow32"
    row_kernel = "reference"
    max_index_mib = 100
    self_test = false
    force_version = true
    carve_out = 32
    gap_cost = 8
    recompute = 16
    approximate_prefix = false
    """
    policy = ReusePolicy(carve_out=32, gap_cost=8.0, recompute=16, approximate_prefix=False)
    assert read(text, tmp_path) == Settings(
        mode=Mode.OBSERVE,
        matcher="winnow32",
        row_kernel="reference",
        max_index_mib=100,
        self_test=False,
        force_version=True,
        policy=policy,
    )


def test_variables_set_everything_and_win_over_the_file(tmp_path):
    found = read(
        'mode = "observe"\nmin_run = 100\ncarve_out = 7',
        tmp_path,
        IRMINSUL_SGLANG_MODE="off",
        IRMINSUL_SGLANG_MIN_RUN="32",
        IRMINSUL_SGLANG_GAP_COST="2.5",
        IRMINSUL_SGLANG_SELF_TEST="False",
        IRMINSUL_SGLANG_FORCE_VERSION="1",
    )
    assert found == Settings(
        mode=Mode.OFF, self_test=False, force_version=True, policy=ReusePolicy(min_run=32, gap_cost=2.5, carve_out=7)
    )


def test_every_setting_has_a_variable():
    names = [field.name for kind in (Settings, ReusePolicy) for field in dataclasses.fields(kind)]
    for name in set(names) - {"policy"}:
        with pytest.raises(InputError, match=f"IRMINSUL_SGLANG_{name.upper()}|matcher|row kernel"):
            read_settings({f"IRMINSUL_SGLANG_{name.upper()}": "no such value"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("modus = 1", r"unknown setting 'modus'; valid settings: mode, matcher, .*approximate_prefix"),
        ("policy = 1", "unknown setting 'policy'"),
        ('mode = "fast"', r"unknown mode \(mode in .*\) 'fast'; valid modes: off, observe, live"),
        ('matcher = "md5"', "unknown matcher 'md5'; valid matchers: .*winnow64"),
        ('row_kernel = "cuda"', "unknown row kernel 'cuda'; valid row kernels: triton, reference"),
        ('min_run = "64"', "min_run in .* must be of type int, got '64'"),
        ("min_run = true", "min_run in .* must be of type int, got True"),
        ("min_run = 0", "min_run must be >= 1, got 0"),
        ("gap_cost = nan", "gap_cost must be a number >= 0, got nan"),
        ("self_test = 1", "self_test in .* must be of type bool, got 1"),
        ("max_index_mib = 0", "max_index_mib must be >= 1, got 0"),
        ("mode = ", "cannot read IRMINSUL_SGLANG_CONFIG="),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_valid(text, told, tmp_path):
    with pytest.raises(InputError, match=told):
        read(text, tmp_path)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot read IRMINSUL_SGLANG_CONFIG=.*No such file"):
        read_settings({"IRMINSUL_SGLANG_CONFIG": str(tmp_path / "none.toml")})
    (tmp_path / "latin.toml").write_bytes(b"mode = '\xe9'")
    with pytest.raises(InputError, match="cannot read IRMINSUL_SGLANG_CONFIG="):
        read_settings({"IRMINSUL_SGLANG_CONFIG": str(tmp_path / "latin.toml")})


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("MINRUN", "3", "IRMINSUL_SGLANG_MINRUN: unknown setting 'minrun'; valid settings: "),
        ("MIN_RUN", "many", "IRMINSUL_SGLANG_MIN_RUN must be a number, got 'many'"),
        ("MIN_RUN", "2.5", "IRMINSUL_SGLANG_MIN_RUN must be a number, got '2.5'"),
        ("GAP_COST", "inf", "gap_cost must be a number >= 0, got inf"),
        ("SELF_TEST", "yes", "IRMINSUL_SGLANG_SELF_TEST must be true or false, got 'yes'"),
        ("MODE", "", "unknown mode"),
    ],
)
def test_a_wrong_variable_is_refused(variable, text, told):
    with pytest.raises(InputError, match=told):
        read_settings({f"IRMINSUL_SGLANG_{variable}": text})


@pytest.mark.parametrize("parameters", [None, {}, {"other": {"mode": "off"}}, {"irminsul": None}])
def test_a_request_that_asks_for_nothing(parameters):
    assert read_request_options(parameters) == RequestOptions()


@pytest.mark.parametrize("parameters", ["irminsul", '{"irminsul": {"mode": "off"}}', [{"irminsul": {}}], 3])
def test_options_that_are_no_object_are_refused(parameters):
    with pytest.raises(InputError, match="custom_params must be an object, got "):
        read_request_options(parameters)


def test_a_request_that_asks():
    asked = {"irminsul": {"mode": "off", "tenant": "a"}}
    assert read_request_options(asked) == RequestOptions(Mode.OFF, "a")
    assert read_request_options({"irminsul": {"tenant": "a"}}) == RequestOptions(None, "a")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'; valid modes: off, observe, live"),
        ({"modus": "off"}, "must be an object of mode and tenant, got {'modus': 'off'}"),
        ("off", "must be an object of mode and tenant, got 'off'"),
        ({"tenant": 7}, "custom_params.irminsul.tenant must be a string of up to 256 characters, got 7"),
        ({"tenant": "a" * 257}, "must be a string of up to 256 characters, got 'aaaa"),
    ],
)
def test_a_request_that_asks_wrongly_is_refused(asked, told):
    with pytest.raises(InputError, match=told):
        read_request_options({"irminsul": asked})
