//! Requests: a job's work for its PEs, and its encoding.
//!
//! A command converts its flags to a [`Request`]. The supervisor sends the request as JSON to every PE, so PEs need not parse flags. Over
//! TCP and MPI, without a supervisor, every process makes the same request from the same command line.

mod bench;
mod field;
mod probe;
mod run;

use serde::{Deserialize, Serialize};

pub use bench::{Inject, MoeBench, Op, P2pBench, Scope, StragglerBench, StragglerMode};
pub use field::FieldError;
pub use probe::{ProbeRequest, ProbedExpert};
pub use run::{DeviceKind, NonFinitePolicy, OnFailure, PlanSource, Replanning, RowsPer, RunRequest, Work};

use super::launch::VERSION;

/// The work of a job's PEs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Runs steps of a layer.
    Run(Box<RunRequest>),
    /// Compares a layer with the GEMMs of its experts alone.
    BenchMoe(Box<MoeBench>),
    /// Measures operations between two PEs.
    BenchP2p(P2pBench),
    /// Measures all-to-all steps, and how much single PEs delay them.
    BenchStraggler(StragglerBench),
    /// Measures links, speeds and memory.
    Probe(ProbeRequest),
}

/// The version of a request, and then the request.
#[derive(Serialize)]
struct Envelope<'r> {
    version: u32,
    program: &'r str,
    request: &'r Request,
}

/// The part of an envelope that every version can read.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Head {
    version: u32,
    program: String,
}

#[derive(Deserialize)]
struct Body {
    request: Request,
}

/// Errors of decoding a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Another version of the program made the request.
    #[error(
        "the request is of aristos {program} (protocol {version}), this PE is aristos {} (protocol {VERSION}): all must be the same",
        env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// The program's version.
        program: String,
        /// That program's [`VERSION`].
        version: u32,
    },
    /// The bytes are not a request.
    #[error("the request cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
}

impl Request {
    /// Encodes the request.
    ///
    /// # Errors
    /// Returns an error if JSON cannot represent a value.
    pub fn to_bytes(&self) -> Result<Vec<u8>, RequestError> {
        let envelope = Envelope { version: VERSION, program: env!("CARGO_PKG_VERSION"), request: self };
        Ok(serde_json::to_vec(&envelope)?)
    }

    /// Decodes the bytes of [`Request::to_bytes`].
    ///
    /// # Errors
    /// Returns an error of one line if another version made the request, or if it is invalid.
    pub fn from_bytes(bytes: &[u8]) -> Result<Request, RequestError> {
        let Head { version, program } = serde_json::from_slice(bytes)?;
        if (version, &*program) != (VERSION, env!("CARGO_PKG_VERSION")) {
            return Err(RequestError::Version { program, version });
        }
        Ok(serde_json::from_slice::<Body>(bytes)?.request)
    }
}

/// Serialises paths as bytes, because they need not be UTF-8.
mod path_bytes {
    use std::ffi::OsString;
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        OsString::deserialize(deserializer).map(PathBuf::from)
    }
}

/// Like [`path_bytes`], for an optional path.
mod optional_path_bytes {
    use std::ffi::OsString;
    use std::path::PathBuf;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| path.as_os_str()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<OsString>::deserialize(deserializer)?.map(PathBuf::from))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;
    use crate::moe::{Dtype, Options};
    use crate::plan::Replication;

    fn request() -> RunRequest {
        RunRequest {
            work: Work::Checkpoint {
                model: PathBuf::from(OsStr::from_bytes(b"no\xffutf-8")),
                layer: 3,
                input: PathBuf::from("in"),
            },
            pes: 4,
            plan: Some(PlanSource::Auto { memory_mb: vec![0.1, 1e15], replicas: Some(Replication::AtMost(2)) }),
            on_failure: OnFailure::Stop,
            hot_shift_every: Some(3),
            replan: Some(Replanning { every: 7, replicas: Replication::Auto, cluster: "{}".into() }),
            inject: Some(PathBuf::from("c")),
            device: DeviceKind::Cpu,
            #[cfg(feature = "device")]
            symmetric: crate::gpu::SymmetricBy::Nvshmem,
            #[cfg(feature = "device")]
            gemm: None,
            #[cfg(feature = "device")]
            tile: None,
            #[cfg(feature = "device")]
            lane_stores: false,
            #[cfg(feature = "device")]
            graph: false,
            dtype: Dtype::Bf16,
            rows_per: RowsPer::Pe,
            steps: 7,
            sgd: Some(0.1),
            options: Options { budget_factor: 0.1 + 0.2, wait_limit: Duration::from_nanos(123), ..Options::default() },
            losses: (0.1, f32::MIN_POSITIVE),
            capacity_factor: Some(1.0 / 3.0),
            output: Some(PathBuf::from(OsStr::from_bytes(b"\xfe"))),
            save_weights: Some(PathBuf::from(OsStr::from_bytes(b"w\xfe"))),
            routing: Some(PathBuf::from(OsStr::from_bytes(b"r\xfe"))),
            save_routing: None,
            non_finite: NonFinitePolicy::Stop,
            check: true,
            trace: None,
            json: false,
        }
    }

    #[test]
    fn a_request_comes_as_it_was_sent() {
        let sent = Request::Run(Box::new(request()));
        let came = Request::from_bytes(&sent.to_bytes().unwrap()).unwrap();
        assert_eq!(format!("{came:?}"), format!("{sent:?}"));
    }

    #[test]
    fn another_versions_request_is_one_line() {
        let said = |text: &str| Request::from_bytes(text.as_bytes()).unwrap_err().to_string();
        let ours = env!("CARGO_PKG_VERSION");
        assert_eq!(
            said(r#"{"version":99,"program":"9.9.9","request":{"fly":1},"more":[]}"#),
            format!(
                "the request is of aristos 9.9.9 (protocol 99), this PE is aristos {ours} (protocol {VERSION}): all must be the same"
            )
        );
        assert!(said(&format!(r#"{{"version":{},"program":"{ours}"}}"#, VERSION - 1)).contains("all must be the same"));
        let unknown = format!(r#"{{"version":{VERSION},"program":"{ours}","request":{{"fly":1}}}}"#);
        assert!(said(&unknown).starts_with("the request cannot be read: unknown variant `fly`"), "{}", said(&unknown));
        assert!(said("run --steps 3").starts_with("the request cannot be read: "));
    }

    #[test]
    fn a_wrong_field_is_named_with_its_value() {
        let error = FieldError::new("steps", 0, "at least 1");
        assert_eq!(error.to_string(), "`steps` is 0, expected at least 1");
    }
}
