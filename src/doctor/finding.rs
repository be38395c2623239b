//! The result of a check.

use serde::Serialize;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Meets the requirement.
    Ok,
    /// Works, but not at full speed, or not everywhere.
    Warn,
    /// Runs that need it fail.
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

/// The runs that need what a check covers.
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

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Subject of the check: "driver", "memlock".
    pub topic: &'static str,
    /// Its result.
    pub level: Level,
    /// The runs that need it.
    pub need: Need,
    /// Description of the current state.
    pub found: String,
    /// Suggested remedy.
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
