"""The section `logger`: settings without effect are refused; trackers switched off on purpose keep their settings."""

import pytest
import yaml

from tandem.config.load import load_config
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")


def test_settings_of_a_tracker_that_is_not_enabled_are_refused():
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["logger.wandb.project=mine"])
    assert str(refused.value) == (
        "command line: logger.wandb.project = mine has no effect: wandb is not enabled. Set "
        "logger.wandb_enabled=true; to keep wandb off on purpose, set it to false."
    )


@pytest.mark.parametrize("switched", ["true", "false"])
def test_settings_of_a_tracker_that_was_switched_on_or_off_are_kept(switched):
    loaded = load_config(None, ["logger.mlflow.tracking_uri=http://x", f"logger.mlflow_enabled={switched}"])
    assert loaded.config.logger.mlflow.tracking_uri == "http://x"
    assert loaded.config.logger.enabled == (["mlflow"] if switched == "true" else [])


def test_a_resolved_configuration_reads_back_the_same(tmp_path):
    first = load_config(None, ["logger.wandb.name=x", "logger.wandb_enabled=false"]).as_yaml()
    (tmp_path / "config.yaml").write_text(first)
    assert load_config(str(tmp_path / "config.yaml"), []).as_yaml() == first
    assert yaml.safe_load(first)["logger"]["monitor_gpus"] is True


def test_a_summary_shorter_than_the_time_between_samples_is_refused():
    with pytest.raises(ConfigError, match=r"flush_interval = 5 is below collection_interval = 10"):
        load_config(None, ["logger.gpu_monitoring.flush_interval=5"])


@pytest.mark.parametrize("key", ["log_nemo_names", "log_trl_names"])
def test_names_for_trackers_are_refused_without_a_tracker(key):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"logger.{key}=true"])
    assert str(refused.value) == (
        f"command line: logger.{key} = true has no effect: no tracker is enabled. Set logger.tensorboard_enabled=true, "
        f"logger.wandb_enabled=true or logger.mlflow_enabled=true, or leave out logger.{key}."
    )


@pytest.mark.parametrize("key", ["log_nemo_names", "log_trl_names"])
def test_names_for_trackers_are_off_by_default_and_stay_if_trackers_are_switched_off_on_purpose(key):
    assert getattr(load_config(None, []).config.logger, key) is False
    for switched in ("true", "false"):
        loaded = load_config(None, [f"logger.{key}=true", f"logger.wandb_enabled={switched}"])
        assert getattr(loaded.config.logger, key) is True
