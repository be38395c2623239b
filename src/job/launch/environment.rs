//! Reads this process's rank from the environment that Slurm, Open MPI, MPICH or torchrun has set.

use super::MAX_PES;

/// The environment variable with a secret that the processes of a job share. Optional.
const ENV_TOKEN: &str = "ARISTOS_JOB_TOKEN";

/// Slurm uses step numbers from this one on for the batch script, the interactive shell and the external step, which have no tasks.
const SLURM_NO_STEP: u32 = 0xffff_fff0;

/// One of the processes that a launcher started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LaunchedProcess {
    /// The launcher's name, for messages.
    pub(super) launcher: &'static str,
    /// This process's rank.
    pub(super) rank: usize,
    /// Number of processes.
    pub(super) size: usize,
    /// Whether the launcher reports that all processes are on one host.
    pub(super) one_host: bool,
    /// An identifier that all processes of the job share, and that differs from those of other jobs on the host.
    pub(super) job: String,
    /// Rank 0's TCP address as HOST:PORT, reachable from all hosts, if the launcher provides one.
    pub(super) address: Option<String>,
}

/// Invalid variables of a launcher.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadEnvironment {
    /// The error as one line.
    pub(super) line: String,
    /// Whether this process prints the line.
    pub(super) speaks: bool,
}

/// Access to the environment.
struct Env<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
    rank_name: &'a str,
}

impl Env<'_> {
    fn has(&self, name: &str) -> bool {
        (self.get)(name).is_some()
    }

    fn text(&self, name: &str) -> String {
        (self.get)(name).unwrap_or_default()
    }

    fn bad(&self, line: String) -> BadEnvironment {
        // If the rank is unknown, every process prints the error.
        let speaks = self.text(self.rank_name).parse::<usize>().map_or(true, |rank| rank == 0);
        BadEnvironment { line, speaks }
    }

    fn number(&self, name: &str) -> Result<usize, BadEnvironment> {
        let value = self.text(name);
        value.parse().map_err(|_| self.bad(format!("{name}={value}: not a number, as a launcher sets it")))
    }

    /// Reads the process's rank and the number of processes from the variables. `None` for a single process.
    fn process(
        &self,
        launcher: &'static str,
        size_name: &str,
        job: String,
    ) -> Result<Option<LaunchedProcess>, BadEnvironment> {
        let (rank, size) = (self.number(self.rank_name)?, self.number(size_name)?);
        if rank >= size || size > MAX_PES {
            let rank_name = self.rank_name;
            let line = format!(
                "{rank_name}={rank} and {size_name}={size}: a launcher sets the first below the second, and that to \
                 at most {MAX_PES}"
            );
            return Err(self.bad(line));
        }
        Ok((size > 1).then_some(LaunchedProcess { launcher, rank, size, one_host: true, job, address: None }))
    }
}

/// This process as one of several that a launcher started. `None` if no launcher started this process, or only this one.
///
/// The innermost launcher is returned, since `torchrun` and `mpirun` may be started in steps of Slurm. `parent` is the id of this process's
/// parent, which is the only identifier that MPICH's processes share.
pub(super) fn launched_process(
    get: &dyn Fn(&str) -> Option<String>,
    parent: i32,
) -> Result<Option<LaunchedProcess>, BadEnvironment> {
    let env = |rank_name| Env { get, rank_name };
    let torch = env("RANK");
    if torch.has("TORCHELASTIC_RUN_ID") || ["RANK", "WORLD_SIZE", "MASTER_PORT"].iter().all(|name| torch.has(name)) {
        let port = torch.text("MASTER_PORT");
        if port.parse::<u16>().ok().is_none_or(|port| port == 0) {
            return Err(torch.bad(format!("MASTER_PORT={port}: not a port, expected 1 to 65535")));
        }
        let (run, restart) = (torch.text("TORCHELASTIC_RUN_ID"), torch.text("TORCHELASTIC_RESTART_COUNT"));
        let process = torch.process("torchrun", "WORLD_SIZE", format!("torchrun-{port}-{restart}-{run}"))?;
        let process = with_hosts(process, &torch, "LOCAL_WORLD_SIZE")?;
        // torchrun's own store listens at MASTER_PORT, so the next port is used.
        let port = port.parse::<u16>().unwrap_or(0);
        let port = if torch.has("TORCHELASTIC_RUN_ID") { port.wrapping_add(1).max(1) } else { port };
        let host = if torch.has("MASTER_ADDR") { torch.text("MASTER_ADDR") } else { "localhost".to_string() };
        return Ok(process.map(|process| LaunchedProcess { address: Some(with_port(&host, port)), ..process }));
    }
    let ompi = env("OMPI_COMM_WORLD_RANK");
    if ompi.has("OMPI_COMM_WORLD_RANK") {
        let names = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"];
        let job = names.iter().find_map(|name| get(name)).unwrap_or_else(|| format!("child-of-{parent}"));
        let process = ompi.process("Open MPI", "OMPI_COMM_WORLD_SIZE", format!("openmpi-{job}"))?;
        return with_hosts(process, &ompi, "OMPI_COMM_WORLD_LOCAL_SIZE");
    }
    let slurm = env("SLURM_PROCID");
    // SLURM_PROCID alone does not mean a task: the shell of a batch script has it too, and a shell in an allocation has the allocation's
    // variables.
    let step = slurm.text("SLURM_STEP_ID").parse::<u32>().ok().filter(|step| *step < SLURM_NO_STEP);
    let tasks = if slurm.has("SLURM_STEP_NUM_TASKS") { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
    let slurm_step = step.filter(|_| slurm.has("SLURM_PROCID") && slurm.has(tasks));
    let pmi = env("PMI_RANK");
    // Slurm sets PMI variables for its own tasks too. If their values differ from Slurm's, an mpiexec whose proxies Slurm started has set
    // them.
    let of_slurm = slurm_step.is_some() && pmi.text("PMI_SIZE") == slurm.text(tasks);
    if pmi.has("PMI_RANK") && pmi.has("PMI_SIZE") && !of_slurm {
        let process = pmi.process("MPICH", "PMI_SIZE", format!("mpich-child-of-{parent}"))?;
        return with_hosts(process, &pmi, "MPI_LOCALNRANKS");
    }
    if let Some(step) = slurm_step {
        let job = format!("slurm-{}.{step}", slurm.text("SLURM_JOB_ID"));
        let process = slurm.process("Slurm", tasks, job.clone())?;
        let nodes = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"].into_iter().find(|name| slurm.has(name));
        let several = nodes.map(|name| slurm.number(name)).transpose()?.is_some_and(|nodes| nodes > 1);
        let lists = ["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"];
        let first = lists.into_iter().find(|name| slurm.has(name)).and_then(|name| first_node(&slurm.text(name)));
        let port = port_of(&job);
        let address = if several { first } else { Some("localhost".to_string()) }.map(|node| with_port(&node, port));
        return Ok(process.map(|process| LaunchedProcess { one_host: !several, address, ..process }));
    }
    if env("PMIX_RANK").has("PMIX_RANK") && env("PMIX_RANK").has("PMIX_NAMESPACE") {
        let line =
            "PMIX_RANK is set, but nothing says how many processes there are: start with mpirun, srun or torchrun";
        return Err(env("PMIX_RANK").bad(line.to_string()));
    }
    Ok(None)
}

/// Sets `one_host` and `address` of `process` according to the variable `local_size_name`, if that is set.
fn with_hosts(
    process: Option<LaunchedProcess>,
    env: &Env<'_>,
    local_size_name: &str,
) -> Result<Option<LaunchedProcess>, BadEnvironment> {
    match process {
        Some(process) if env.has(local_size_name) => {
            let one_host = env.number(local_size_name)? >= process.size;
            let address = one_host.then(|| with_port("localhost", port_of(&process.job)));
            Ok(Some(LaunchedProcess { one_host, address, ..process }))
        }
        process => Ok(process),
    }
}

fn with_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// A port from 20000 to 29999, below the ephemeral ports, derived from a hash of the job's name.
fn port_of(job: &str) -> u16 {
    // FNV-1a, 32 bits.
    let hash = job.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    20_000 + (hash % 10_000) as u16
}

/// The first node of a list in Slurm's format: that of `nid[001-003,7],login1` is nid001.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    let node = match rest.strip_prefix('[') {
        Some(numbers) => {
            let end = numbers.find([',', '-', ']'])?;
            // The name continues after the brackets: rack[1-2]node.
            let suffix = &numbers[numbers.find(']')? + 1..];
            let suffix = &suffix[..suffix.find(',').unwrap_or(suffix.len())];
            format!("{prefix}{}{suffix}", &numbers[..end])
        }
        None => prefix.to_string(),
    };
    (!node.is_empty() && !node.contains(['[', ']'])).then_some(node)
}

/// The job's token: the value of `ARISTOS_JOB_TOKEN`, or an empty string if it is not set.
pub fn job_token() -> String {
    std::env::var_os(ENV_TOKEN).unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &str) -> Result<Option<LaunchedProcess>, BadEnvironment> {
        let pairs: Vec<(&str, &str)> = variables.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
        launched_process(&|name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()), 77)
    }

    fn is(variables: &str, rank: usize, size: usize, one_host: bool, job: &str) {
        let process = of(variables).unwrap().unwrap_or_else(|| panic!("{variables}: no launcher"));
        assert_eq!(
            (process.rank, process.size, process.one_host, &*process.job),
            (rank, size, one_host, job),
            "{variables}"
        );
    }

    const STEP: &str =
        "SLURM_JOB_ID=12 SLURM_STEP_ID=3 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=8 SLURM_NNODES=2";

    #[test]
    fn every_launcher_is_recognised() {
        is(&format!("{STEP} SLURM_STEP_NUM_NODES=1"), 1, 4, true, "slurm-12.3");
        is(STEP, 1, 4, false, "slurm-12.3");
        is(&format!("{STEP} PMI_RANK=1 PMI_SIZE=4 SLURM_STEP_NUM_NODES=1"), 1, 4, true, "slurm-12.3");
        let ompi = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 PMIX_NAMESPACE=99 PMIX_RANK=2";
        is(&format!("{ompi} OMPI_COMM_WORLD_LOCAL_SIZE=3"), 2, 3, true, "openmpi-99");
        is(&format!("{ompi} OMPI_COMM_WORLD_LOCAL_SIZE=2"), 2, 3, false, "openmpi-99");
        is("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2", 0, 2, true, "mpich-child-of-77");
        is("RANK=0 WORLD_SIZE=2 MASTER_PORT=29500", 0, 2, true, "torchrun-29500--");
        is("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_PORT=1 TORCHELASTIC_RUN_ID=r", 1, 2, false, "torchrun-1--r");
    }

    #[test]
    fn rank_0_address_is_read_from_the_launcher() {
        let address = |variables: &str| of(variables).unwrap().unwrap().address;
        let torch = "RANK=1 WORLD_SIZE=2 MASTER_PORT=29500";
        assert_eq!(address(torch).unwrap(), "localhost:29500");
        assert_eq!(address(&format!("{torch} MASTER_ADDR=node7")).unwrap(), "node7:29500");
        assert_eq!(address(&format!("{torch} MASTER_ADDR=fd00::1 TORCHELASTIC_RUN_ID=r")).unwrap(), "[fd00::1]:29501");
        let near = address(&format!("{STEP} SLURM_STEP_NUM_NODES=1")).unwrap();
        let far = address(&format!("{STEP} SLURM_NODELIST=nid[0012-0013]")).unwrap();
        assert_eq!(near.replace("localhost", "nid0012"), far);
        assert!(
            far.strip_prefix("nid0012:").unwrap().parse::<u16>().is_ok_and(|port| (20_000..30_000).contains(&port))
        );
        assert_eq!(address(STEP), None);
        let ompi = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 PMIX_NAMESPACE=99";
        assert!(address(&format!("{ompi} OMPI_COMM_WORLD_LOCAL_SIZE=3")).unwrap().starts_with("localhost:2"));
        assert_eq!(address(&format!("{ompi} OMPI_COMM_WORLD_LOCAL_SIZE=2")), None);
    }

    #[test]
    fn slurms_lists_of_nodes_are_read() {
        for (list, first) in [
            ("nid0001", "nid0001"),
            ("nid[0001-0003,7],login1", "nid0001"),
            ("a,b[1-2]", "a"),
            ("rack[1-2]node,x", "rack1node"),
            ("n[7]", "n7"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        for list in ["", "[", "n[1", "a[1]b[2]", ","] {
            assert_eq!(first_node(list), None, "{list}");
        }
    }

    #[test]
    fn the_innermost_launcher_counts() {
        is(&format!("{STEP} OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=6 PMIX_NAMESPACE=9"), 5, 6, true, "openmpi-9");
        is(&format!("{STEP} PMI_RANK=5 PMI_SIZE=6"), 5, 6, true, "mpich-child-of-77");
        is(&format!("{STEP} RANK=5 WORLD_SIZE=6 MASTER_PORT=7"), 5, 6, true, "torchrun-7--");
    }

    #[test]
    fn no_step_and_no_company_mean_no_launcher() {
        let allocation = "SLURM_JOB_ID=12 SLURM_NTASKS=4 SLURM_NNODES=1";
        for variables in [
            "",
            allocation,
            &format!("{allocation} SLURM_PROCID=0"),
            &format!("{allocation} SLURM_PROCID=0 SLURM_STEP_ID=4294967291"),
            &format!("{allocation} SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1"),
            "SLURM_JOB_ID=12 SLURM_STEP_ID=3 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
            "MASTER_PORT=29500 MASTER_ADDR=here",
            "RANK=3",
        ] {
            assert_eq!(of(variables), Ok(None), "{variables}");
        }
    }

    #[test]
    fn what_no_launcher_sets_is_one_line_that_one_process_says() {
        let refused = |variables: &str, part: &str, speaks: bool| {
            let bad = of(variables).unwrap_err();
            assert!(bad.line.contains(part) && bad.speaks == speaks, "{variables}: {bad:?}");
        };
        refused("RANK=0 WORLD_SIZE=2 MASTER_PORT=seven", "MASTER_PORT=seven: not a port", true);
        refused("RANK=1 WORLD_SIZE=2 MASTER_PORT=0", "MASTER_PORT=0: not a port", false);
        refused("OMPI_COMM_WORLD_RANK=x OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=x: not a number", true);
        refused("PMI_RANK=2 PMI_SIZE=2", "PMI_RANK=2 and PMI_SIZE=2", false);
        refused("PMI_RANK=0 PMI_SIZE=2000", "at most 1024", true);
        refused("PMIX_RANK=0 PMIX_NAMESPACE=n", "nothing says how many", true);
    }
}
