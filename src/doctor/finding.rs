//! A finding: its topic, its level and its cure.

use serde::Serialize;

/// The state of what was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Runs, but not as well as it could, or not everywhere.
    Warn,
    /// The runs that need it fail.
    Fail,
}

impl Level {
    pub(super) fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "fail",
        }
    }
}

/// Which runs need what was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Need {
    /// Every run.
    Cpu,
    /// Runs on CUDA devices.
    Cuda,
    /// Runs on CUDA devices of several hosts.
    Network,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at: "driver", "memlock".
    pub topic: &'static str,
    /// Its state.
    pub level: Level,
    /// Which runs need it.
    pub need: Need,
    /// What was found.
    pub found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

impl Finding {
    pub(super) fn ok(topic: &'static str, need: Need, found: impl Into<String>) -> Self {
        Finding { topic, level: Level::Ok, need, found: found.into(), cure: None }
    }

    pub(super) fn warn(topic: &'static str, need: Need, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Finding { topic, level: Level::Warn, need, found: found.into(), cure: Some(cure.into()) }
    }

    pub(super) fn fail(topic: &'static str, need: Need, found: impl Into<String>, cure: impl Into<String>) -> Self {
        Finding { topic, level: Level::Fail, need, found: found.into(), cure: Some(cure.into()) }
    }
}
