//! What a process sends when it connects to a rendezvous, and whether it is admitted.

use serde::{Deserialize, Serialize};

use super::VERSION;
use super::environment::LaunchedProcess;

/// Secret of a job's processes, where the user sets one.
const ENV_TOKEN: &str = "ARISTOS_JOB_TOKEN";

/// What the user gave.
pub(super) fn token() -> String {
    std::env::var_os(ENV_TOKEN).unwrap_or_default().to_string_lossy().into_owned()
}

/// The body of a `Join` frame, as JSON. Another version's must be readable at least as far as its version, so
/// missing fields have defaults, and unknown ones are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Hello {
    /// [`VERSION`].
    protocol: u32,
    /// The program's version.
    version: String,
    /// See [`LaunchedProcess::job`].
    job: String,
    /// `ARISTOS_JOB_TOKEN`, empty where there is none.
    token: String,
    /// The process.
    rank: usize,
    /// How many it takes part with.
    size: usize,
}

impl Hello {
    /// What this process says.
    pub(super) fn of(process: &LaunchedProcess) -> Hello {
        Hello {
            protocol: VERSION,
            version: env!("CARGO_PKG_VERSION").to_string(),
            job: process.job.clone(),
            token: token(),
            rank: process.rank,
            size: process.size,
        }
    }

    /// As JSON.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        // Strings and numbers can always be written.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The rank of the process that sent `said`, if rank 0 (`self`) admits it; otherwise why not.
    pub(super) fn admit(&self, said: &[u8]) -> Result<usize, String> {
        let said: Hello = serde_json::from_slice(said).map_err(|_| "it sent no valid hello".to_string())?;
        if (said.protocol, &said.version) != (self.protocol, &self.version) {
            return Err(format!(
                "it is aristos {} (protocol {}), rank 0 is aristos {} (protocol {}): all must be the same",
                said.version, said.protocol, self.version, self.protocol
            ));
        }
        if said.job != self.job || said.token != self.token {
            return Err("it does not know the job's token".to_string());
        }
        if said.size != self.size || !(1..self.size).contains(&said.rank) {
            return Err(format!("it is rank {} of {}, of {} expected", said.rank, said.size, self.size));
        }
        Ok(said.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_the_job_is_admitted() {
        let (launcher, job) = ("test", "j".to_string());
        let process =
            |rank| LaunchedProcess { launcher, rank, size: 3, one_host: true, job: job.clone(), address: None };
        let (zero, two) = (Hello::of(&process(0)), Hello::of(&process(2)));
        assert_eq!(zero.admit(&two.to_bytes()), Ok(2));
        let refused = |hello: Hello, part: &str| {
            let why = zero.admit(&hello.to_bytes()).unwrap_err();
            assert!(why.contains(part), "{why}");
        };
        refused(
            Hello { version: "0.0.9".into(), ..two.clone() },
            &format!("it is aristos 0.0.9 (protocol {VERSION}), rank 0 is aristos"),
        );
        refused(Hello { protocol: 0, ..two.clone() }, "(protocol 0)");
        refused(Hello { token: "x".into(), ..two.clone() }, "token");
        refused(Hello { job: "k".into(), ..two.clone() }, "token");
        refused(Hello { rank: 0, ..two.clone() }, "rank 0 of 3");
        refused(Hello { size: 4, ..two.clone() }, "rank 2 of 4");
        assert!(zero.admit(b"GET / HTTP/1.1").unwrap_err().contains("no valid hello"));
        // Of a later version, with words that this one does not know.
        assert!(zero.admit(br#"{"protocol":9,"version":"2.0","more":[1]}"#).unwrap_err().contains("aristos 2.0"));
    }
}
