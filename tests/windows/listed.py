"""A plugin of pytest for a Windows Python (scripts/wine): skips the tests that do not run there, and says why."""

from __future__ import annotations

import pytest

RUN = (
    *("tests/machine", "tests/test_config.py", "tests/model/test_made.py", "tests/model/test_artifact.py"),
    *("tests/sessions/rows/test_damage.py", "tests/sessions/rows/test_lock.py"),
    *("tests/sessions/rows/test_migrate.py", "tests/sessions/rows/test_retention.py", "tests/sessions/test_store.py"),
    *("tests/sessions/test_old_files.py", "tests/sessions/files/test_transfer.py"),
    *("tests/hub/test_wheel.py", "tests/daemon_client/test_discovery.py", "tests/daemon_client/test_logfile.py"),
    *("tests/runtimes/litert/test_litert.py", "tests/runtime/test_trial.py", "tests/runtime/test_caches.py"),
)
ARTIFACTS = (  # of another system; here none is built
    *("llama-f32", "llama-int8", "granite-f32", "granite-int8", "mamba-f32", "openvino-granite-f32"),
)
NOT_COLLECTED = ("tests/machine/test_progress.py",)  # it draws on a terminal of Unix
_MODES = "rights are no modes there; tests/machine/test_folder.py sees who may open a folder"
_UNIX = "of Unix: its sockets, pipes, links, users or signals"
_BARE = "this Python has no pip and no PyTorch: nothing is fetched by the one nor built with the other"
_TEST = "the test itself is written for Unix: its paths, line ends or shell"
NOT_HERE = {  # reasons: parts of the ids of tests
    _MODES: (
        *("test_prepare_makes_a_private_directory", "test_prepare_refuses_what_others_can_write", "test_modes"),
        *("test_a_settings_file_that_others_may_write", "test_a_settings_file_with_a_key_that_others_may_read"),
        *("test_an_artifact_is_known_wherever", "test_what_is_damaged_or_could_be_anybodys", "test_it_is_held_by_one"),
        *(
            "test_a_directory_of_others_keeps_its_mode",
            "test_it_is_found_where_it_says",
            "test_a_directory_that_is_closed",
        ),
        *("test_a_file_that_others_may_have_read_or_written", "test_one_that_others_could_read_is_closed_to_them"),
        *("test_a_verdict_that_others_could_have_written", "test_it_has_two_files_of_a_bounded_size"),
    ),
    _UNIX: (
        *("test_network.py", "test_services.py::test_a_service_of_the_machine", "test_at_a_socket"),
        *("test_prepare_refuses_a_directory_of_another_user", "test_logfile.py::test_what_lies_in_its_place"),
        *(
            "test_lock.py::test_what_lies_in_its_place",
            "test_not_even_a_file[pipe]",
            "test_an_accident_is_no_verdict[KILL]",
        ),
        *("test_an_accident_is_no_verdict[TERM]", "test_an_accident_is_no_verdict[XCPU]", "test_a_second_daemon"),
        *("test_a_quota_that_became_smaller", "test_what_no_kernel_tells_is_nothing"),
        *("test_a_model_pulled_for_an_npu_is_not_used", "test_folders_of_pip_come_and_go"),
    ),
    _TEST: (
        *("test_prepare_refuses_a_file_in_the_way", "test_a_misspelt_variable_is_refused_by_name[ssmd_apikey"),
        *(
            "test_installation.py::test_a_clone",
            "test_installation.py::test_a_wheel",
            "test_installation.py::test_pip_is",
        ),
        *("test_settings_files_name_the_index",),
        *("test_what_is_installed_anew_has_its_bounds", "test_what_one_left_that_was_killed"),
        *("test_what_comes_is_read_once", "test_of_a_file_without_end_the_last_part_is_read"),
    ),
    _BARE: (
        *("test_what_ends_early_is_refused[pip]", "test_a_hub_that_is_named_comes_first", "test_a_revision_is_that_of"),
        *("test_offline_nothing_is_asked[build", "test_nothing_is_fetched_for_a_build_that_cannot_be"),
    ),
    "wine binds a socket to another computer's address": ("203.0.113.9:7763", "128.0.0.1:7763"),
    "a file that is open cannot be damaged, nor exchanged": ("test_a_damaged_weight_cache_is_replaced",),
}


def pytest_ignore_collect(collection_path: object) -> bool | None:
    """Leave out what cannot be imported."""
    return True if str(collection_path).replace("\\", "/").endswith(NOT_COLLECTED) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is not here, and say why."""
    for item in items:
        for why, parts in NOT_HERE.items():
            if any(part in item.nodeid for part in parts):
                item.add_marker(pytest.mark.skip(reason=why))
