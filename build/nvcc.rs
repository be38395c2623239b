//! Compiles the CUDA kernels for the feature `cuda`: one fat binary per module, embedded in the crate.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;
use std::{env, fs, process, thread};

/// A translation unit of `kernels/` and its compiler options. Modules without a source file are skipped.
struct Module {
    name: &'static str,
    /// `-gencode` arguments: machine code, and PTX for future devices.
    targets: &'static [&'static str],
    hopper: bool,
    /// Further arguments.
    flags: &'static [&'static str],
}

impl Module {
    /// The targets to build: all, or those that ARISTOS_CUDA_ARCHITECTURES lists (such as `sm_80 sm_90a`), which shortens test
    /// builds.
    fn targets(&self) -> Vec<&'static str> {
        let asked = env::var("ARISTOS_CUDA_ARCHITECTURES").unwrap_or_default();
        let asked: Vec<&str> = asked.split_whitespace().collect();
        let code = |target: &&str| target.rsplit('=').next().is_some_and(|code| asked.contains(&code));
        self.targets.iter().copied().filter(|target| asked.is_empty() || code(target)).collect()
    }

    /// Architectures with machine code.
    fn architectures(&self) -> String {
        let codes = self.targets().into_iter().filter_map(|target| target.rsplit('=').next());
        codes.filter(|code| code.starts_with("sm_")).collect::<Vec<_>>().join(" ")
    }
}

const PORTABLE: &[&str] =
    &["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"];

const HOPPER: &[&str] = &["arch=compute_90a,code=sm_90a"];

/// ptxas 13.0 crashes on these kernels for sm_80 at its default level. The GEMM loops are nearly identical at -O2.
const PTXAS_O2: &[&str] = &["-Xptxas", "-O2"];

const MODULES: &[Module] = &[
    Module { name: "layer_ampere", targets: PORTABLE, hopper: false, flags: PTXAS_O2 },
    Module { name: "layer_ampere_64x128", targets: PORTABLE, hopper: false, flags: PTXAS_O2 },
    Module { name: "layer_hopper", targets: HOPPER, hopper: true, flags: &[] },
    Module { name: "layer_hopper_128x128", targets: HOPPER, hopper: true, flags: &[] },
    Module { name: "layer_hopper_256x256", targets: HOPPER, hopper: true, flags: &[] },
    Module { name: "routing", targets: PORTABLE, hopper: false, flags: &[] },
    Module { name: "p2p", targets: PORTABLE, hopper: false, flags: &[] },
    Module { name: "probe", targets: PORTABLE, hopper: false, flags: &[] },
    Module { name: "smoke", targets: PORTABLE, hopper: false, flags: &[] },
];

/// The oldest NVSHMEM whose device code can be built as `kernels/smoke.cu` describes.
const OLDEST_NVSHMEM: [u32; 3] = [3, 4, 5];

/// Paths and versions of CUDA and NVSHMEM.
struct Toolchain {
    nvcc: PathBuf,
    nvshmem: PathBuf,
    cuda_version: String,
    nvshmem_version: [u32; 3],
}

/// Writes to `made` the fat binaries that `src/gpu/cuda/modules.rs` embeds.
pub fn kernels(made: &Path) {
    for name in [
        "CUDA_HOME",
        "NVSHMEM_HOME",
        "ARISTOS_CACHE",
        "ARISTOS_NVCC_FLAGS",
        "ARISTOS_CUDA_ARCHITECTURES",
        "ARISTOS_CUDA_LEFT_OUT",
    ] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=kernels");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    if let Err(error) = fs::create_dir_all(made) {
        fail(&format!("cannot make {}: {error}", made.display()));
    }
    let tools = toolchain(&root);
    // Test builds leave out modules that differ from another one only in their tiles.
    let left_out = env::var("ARISTOS_CUDA_LEFT_OUT").unwrap_or_default();
    if let Some(unknown) = left_out.split_whitespace().find(|name| MODULES.iter().all(|m| m.name != *name)) {
        fail(&format!("ARISTOS_CUDA_LEFT_OUT names {unknown}, which is no module of kernels/"));
    }
    let built = |m: &&Module| left_out.split_whitespace().all(|name| name != m.name);
    let modules: Vec<&Module> =
        MODULES.iter().filter(built).filter(|m| source(&root, m).is_file() && !m.targets().is_empty()).collect();
    if modules.is_empty() {
        fail("ARISTOS_CUDA_ARCHITECTURES names none of sm_80, sm_90, sm_90a, or ARISTOS_CUDA_LEFT_OUT all modules");
    }

    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1).min(modules.len());
    let (queue, failures) = (Mutex::new(modules.iter().collect::<VecDeque<_>>()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().ok().and_then(|mut queue| queue.pop_front());
                    let Some(module) = next else { break };
                    if let (Err(error), Ok(mut failures)) = (compile(&tools, &root, made, module), failures.lock()) {
                        failures.push(error);
                    }
                }
            });
        }
    });
    if let Some(error) = failures.into_inner().ok().and_then(|failures| failures.into_iter().next()) {
        fail(&error);
    }

    let mut table = String::from("&[\n");
    for module in &modules {
        let depends = fs::read_to_string(fatbin(made, module).with_extension("d")).unwrap_or_default();
        let _ = writeln!(
            table,
            "    Module {{ name: {:?}, architectures: {:?}, hopper: {}, nvshmem: {}, image: &Image(*include_bytes!({:?})) }},",
            module.name,
            module.architectures(),
            module.hopper,
            depends.contains("nvshmem.h"),
            fatbin(made, module)
        );
    }
    table.push(']');
    write(&out.join("modules.rs"), &table);
    let [major, minor, patch] = tools.nvshmem_version;
    println!("cargo::rustc-env=ARISTOS_NVSHMEM_VERSION={major}.{minor}.{patch}");
    println!("cargo::rustc-env=ARISTOS_NVSHMEM_LIB={}", tools.nvshmem.join("lib").display());
    println!("cargo::rustc-env=ARISTOS_CUDA_VERSION={}", tools.cuda_version);
    // tools/check-machine-code reads this list.
    let line = |module: &&Module| {
        format!("{} {} {}\n", module.name, module.architectures().replace(' ', ","), fatbin(made, module).display())
    };
    let list: String = modules.iter().map(line).collect();
    write(&made.join("list"), &list);
}

fn source(root: &Path, module: &Module) -> PathBuf {
    root.join("kernels").join(module.name).with_extension("cu")
}

fn fatbin(made: &Path, module: &Module) -> PathBuf {
    made.join(module.name).with_extension("fatbin")
}

/// Compiles one module unless its fatbin is up to date (same command line, newer than all inputs).
fn compile(tools: &Toolchain, root: &Path, made: &Path, module: &Module) -> Result<(), String> {
    let (source, fatbin) = (source(root, module), fatbin(made, module));
    let depends = fatbin.with_extension("d");
    let mut nvcc = Command::new(&tools.nvcc);
    nvcc.args(["-std=c++17", "-O3", "-DNDEBUG", "-DARISTOS_NVSHMEM=1", "--expt-relaxed-constexpr", "-lineinfo"])
        .args(["--threads", "0", "-fatbin", "-MD", "-MF"])
        .arg(&depends)
        .arg("-I")
        .arg(root.join("kernels"))
        // As system headers, because NVSHMEM's cause warnings.
        .arg("-isystem")
        .arg(tools.nvshmem.join("include"))
        .args(module.targets().iter().flat_map(|target| ["-gencode", target]));
    if module.hopper {
        nvcc.arg("-DARISTOS_HOPPER=1");
    }
    nvcc.args(module.flags);
    nvcc.args(env::var("ARISTOS_NVCC_FLAGS").unwrap_or_default().split_whitespace());
    nvcc.arg("-o").arg(&fatbin).arg(&source);

    let command = format!("{nvcc:?} {} {:?}", tools.cuda_version, tools.nvshmem_version);
    let stamp = fatbin.with_extension("command");
    if fs::read_to_string(&stamp).is_ok_and(|old| old == command) && up_to_date(&fatbin, &depends) {
        return Ok(());
    }
    let _ = fs::remove_file(&stamp);
    let done = nvcc.output().map_err(|error| format!("cannot run {}: {error}", tools.nvcc.display()))?;
    let (words, errors) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    if !done.status.success() {
        let all = format!("{words}{errors}");
        let first =
            all.lines().find(|line| line.contains("error") || line.contains("fatal")).unwrap_or("no reason given");
        return Err(format!("nvcc failed for kernels/{}.cu ({}): {first}\n{all}", module.name, done.status));
    }
    for line in words.lines().chain(errors.lines()).filter(|line| line.contains("warning")) {
        println!("cargo::warning=kernels/{}.cu: {line}", module.name);
    }
    write(&stamp, &command);
    Ok(())
}

/// Whether `made` exists and is newer than every file that the compiler listed in `depends`.
fn up_to_date(made: &Path, depends: &Path) -> bool {
    let time = |path: &Path| -> Option<SystemTime> { fs::metadata(path).ok()?.modified().ok() };
    let (Some(made), Ok(depends)) = (time(made), fs::read_to_string(depends)) else { return false };
    let files = depends.split_once(" : ").map_or("", |(_, files)| files);
    let mut files = files.split_whitespace().filter(|word| *word != "\\").peekable();
    files.peek().is_some() && files.all(|file| time(Path::new(file)).is_some_and(|time| time < made))
}

/// Finds CUDA in CUDA_HOME, the download of tools/cuda-toolchain, or the PATH; NVSHMEM in NVSHMEM_HOME or that download.
fn toolchain(root: &Path) -> Toolchain {
    const CURE: &str = "run tools/cuda-toolchain, or set CUDA_HOME and NVSHMEM_HOME";
    let home = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = home("ARISTOS_CACHE").unwrap_or_else(|| root.join("target")).join("cuda-toolchain/nvidia");
    let on_path = || {
        let paths = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&paths).map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file())
    };
    let nvcc = match home("CUDA_HOME") {
        Some(cuda) => cuda.join("bin/nvcc"),
        None => [cache.join("cu13/bin/nvcc")]
            .into_iter()
            .find(|nvcc| nvcc.is_file())
            .or_else(on_path)
            .unwrap_or_else(|| fail(&format!("the feature `cuda` needs nvcc, and none is here: {CURE}"))),
    };
    let nvshmem = home("NVSHMEM_HOME").unwrap_or_else(|| cache.join("nvshmem"));
    let header = nvshmem.join("include/non_abi/nvshmem_version.h");
    let Ok(header) = fs::read_to_string(&header) else {
        fail(&format!("the feature `cuda` needs NVSHMEM, and there is no {}: {CURE}", header.display()));
    };
    let number = |name: &str| {
        let value =
            header.lines().find_map(|line| line.strip_prefix("#define ")?.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or(0)
    };
    let version = ["MAJOR", "MINOR", "PATCH"].map(|part| number(&format!("NVSHMEM_VENDOR_{part}_VERSION")));
    if version < OLDEST_NVSHMEM || version[0] != OLDEST_NVSHMEM[0] {
        fail(&format!(
            "NVSHMEM in {} is {version:?}, and one of [3, 4, 5] or newer within 3 is needed: unset NVSHMEM_HOME and \
             run tools/cuda-toolchain",
            nvshmem.display()
        ));
    }
    let said = match Command::new(&nvcc).arg("--version").output() {
        Ok(done) => String::from_utf8_lossy(&done.stdout).into_owned(),
        Err(error) => fail(&format!("cannot run {}: {error}; {CURE}", nvcc.display())),
    };
    let release = said.split("release ").nth(1).and_then(|rest| rest.split(',').next());
    let Some(cuda_version) = release.map(str::to_string) else {
        fail(&format!("{} --version does not tell its release: {CURE}", nvcc.display()));
    };
    Toolchain { nvcc, nvshmem, cuda_version, nvshmem_version: version }
}

fn write(path: &Path, text: &str) {
    if let Err(error) = fs::write(path, text) {
        fail(&format!("cannot write {}: {error}", path.display()));
    }
}

/// Ends the build with an error message instead of a panic's backtrace.
fn fail(message: &str) -> ! {
    let first = message.lines().next().unwrap_or_default();
    println!("cargo::error={first}");
    eprintln!("{message}");
    process::exit(1);
}
