//! Result files: complete, published atomically, and refused before the work if they cannot be written.

mod skip;

use std::fs;
use std::fs::File;
use std::path::Path;
use std::process::Command;

use aristos::checkpoint::{OutputFile, ResultLayout};

fn assert_line(error: &impl std::fmt::Display, parts: &[&str]) {
    let line = format!("{error:#}");
    assert!(!line.contains('\n'), "more than a line: {line}");
    for part in parts {
        assert!(line.contains(part), "{line:?} does not say {part:?}");
    }
}

/// `len` distinct numbers.
fn values(first: f32, len: usize) -> Vec<f32> {
    (0..len).map(|i| first + i as f32).collect()
}

fn layout() -> ResultLayout {
    ResultLayout::new(vec![("output".into(), vec![5, 3]), ("grad.w".into(), vec![2, 4]), ("grad.b".into(), vec![0, 7])])
        .unwrap()
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_result_file_is_a_safetensors_file_that_appears_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let layout = layout();
    assert!(layout.offset_bytes("output").unwrap().is_multiple_of(8));
    let out = OutputFile::create(&path, &layout).unwrap();
    assert_eq!(names_in(dir.path()), [""; 0], "nothing is to be seen before it is published");
    let (x, w) = (values(1.0, 15), values(-9.5, 8));
    // Rows may be written in any order, by any holder of the descriptor.
    layout.write_rows(&out.file().try_clone().unwrap(), "output", 2, &x[6..]).unwrap();
    layout.write_rows(out.file(), "grad.w", 0, &w).unwrap();
    layout.write_rows(out.file(), "output", 0, &x[..6]).unwrap();
    layout.write_rows(out.file(), "output", 5, &[]).unwrap();
    assert_eq!(layout.read(out.file(), "output").unwrap(), x);
    out.publish().unwrap();
    assert_eq!(names_in(dir.path()), ["out.safetensors"]);

    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, layout.len_bytes());
    let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let get = |name| -> Vec<f32> {
        let data = parsed.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    assert_eq!((get("output"), get("grad.w")), (x, w));
    assert_eq!(parsed.tensor("grad.b").unwrap().shape(), [0, 7]);
    assert_eq!(parsed.len(), 3);
}

#[test]
fn an_existing_result_is_replaced_at_publication_and_not_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    fs::write(&path, "old").unwrap();
    let out = OutputFile::create(&path, &layout()).unwrap();
    drop(out);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    OutputFile::create(&link, &layout()).unwrap().publish().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), layout().len_bytes());
    assert_eq!(names_in(dir.path()), ["link", "out.safetensors"]);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

const SET: [&str; 3] = ["trace", "weights", "output"];

/// Files of a set before publication, with `content` in each.
fn set(dir: &Path, content: &str) -> Vec<OutputFile> {
    let file = |name| OutputFile::create_empty(&dir.join(name)).unwrap().with_content(content.as_bytes()).unwrap();
    SET.map(file).into()
}

fn contents(dir: &Path) -> [Option<String>; 3] {
    SET.map(|name| fs::read_to_string(dir.join(name)).ok())
}

#[test]
fn files_of_a_set_are_published_together() {
    let dir = tempfile::tempdir().unwrap();
    for content in ["first", "second"] {
        let before = contents(dir.path());
        let mut files = set(dir.path(), content);
        assert_eq!(contents(dir.path()), before);
        files.insert(1, OutputFile::in_memory(&layout()).unwrap());
        OutputFile::publish_all(files).unwrap();
        assert_eq!(contents(dir.path()), [(); 3].map(|()| Some(content.to_string())));
        assert_eq!(names_in(dir.path()).len(), 3);
    }
    OutputFile::publish_all(Vec::new()).unwrap();
}

#[test]
fn interrupted_publication_does_not_keep_the_old_last_file() {
    let dir = tempfile::tempdir().unwrap();
    OutputFile::publish_all(set(dir.path(), "first")).unwrap();
    let files = set(dir.path(), "second");
    // The second rename fails.
    fs::remove_file(dir.path().join("weights")).unwrap();
    fs::create_dir(dir.path().join("weights")).unwrap();
    assert_line(&OutputFile::publish_all(files).unwrap_err(), &["cannot write", "weights"]);
    assert_eq!(contents(dir.path()), [Some("second".into()), None, None]);
    assert_eq!(names_in(dir.path()), ["trace", "weights"]);
}

#[test]
fn old_files_stay_if_one_of_a_set_gets_no_temporary_name() {
    let dir = tempfile::tempdir().unwrap();
    OutputFile::publish_all(set(dir.path(), "first")).unwrap();
    let mut files = set(dir.path(), "second");
    fs::create_dir(dir.path().join("gone")).unwrap();
    files.insert(2, OutputFile::create_empty(&dir.path().join("gone/routing")).unwrap());
    fs::remove_dir(dir.path().join("gone")).unwrap();
    assert_line(&OutputFile::publish_all(files).unwrap_err(), &["cannot write", "gone/routing"]);
    assert_eq!(contents(dir.path()), [(); 3].map(|()| Some("first".to_string())));
    assert_eq!(names_in(dir.path()).len(), 3);
}

/// Publishes numbered sets in a process of its own until it is killed.
#[test]
fn killed_publication_leaves_files_of_one_set() {
    const NAME: &str = "killed_publication_leaves_files_of_one_set";
    if let Some(dir) = std::env::var_os("PUBLISH_SETS") {
        let first: u64 = std::env::var("FIRST_SET").unwrap().parse().unwrap();
        // A bound, in case that its parent dies first.
        for number in first..first + 10_000 {
            OutputFile::publish_all(set(Path::new(&dir), &number.to_string())).unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mut complete = 0;
    for kill in 0..60u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME])
            .env("PUBLISH_SETS", dir.path())
            .env("FIRST_SET", (kill * 1_000_000).to_string())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_micros(2_000 + rand::random::<u64>() % 20_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let [trace, weights, output] = contents(dir.path());
        if output.is_some() {
            assert_eq!((&trace, &weights), (&output, &output));
            complete += 1;
        }
        for name in names_in(dir.path()).iter().filter(|name| name.ends_with(".tmp")) {
            fs::remove_file(dir.path().join(name)).unwrap();
        }
    }
    println!("{complete} of 60 kills left a complete set");
    assert!(complete > 0);
}

#[test]
fn a_result_in_memory_reads_the_same() {
    let layout = layout();
    let out = OutputFile::in_memory(&layout).unwrap();
    layout.write_rows(out.file(), "grad.w", 1, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    assert_eq!(layout.read(out.file(), "grad.w").unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
    out.publish().unwrap();
}

#[test]
fn an_unwritable_result_is_refused_before_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path, parts: &[&str]| {
        let error = OutputFile::create(path, &layout()).unwrap_err();
        assert_line(&error, parts);
        assert_line(&error, &["cannot write", path.to_str().unwrap()]);
    };
    refused(Path::new("/dev/full"), &["a device", "a regular file"]);
    refused(dir.path(), &["a folder"]);
    refused(&dir.path().join("none/out"), &["No such file"]);
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    refused(&file.join("out"), &["Not a directory"]);
    // Even root cannot create a file here.
    refused(Path::new("/proc/out.safetensors"), &[]);
    assert_eq!(names_in(dir.path()), ["file"]);
}

#[test]
fn a_result_larger_than_the_disk_is_refused_before_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let huge = ResultLayout::new(vec![("output".into(), vec![1 << 50, 64])]).unwrap();
    let error = OutputFile::create(&path, &huge).unwrap_err();
    assert_line(&error, &["cannot write", "out.safetensors", &format!("needs {} bytes", huge.len_bytes())]);
    assert_eq!(names_in(dir.path()), [""; 0]);
}

/// Runs this file's test `name` again, on a separate 1 MiB disk (its path is in `SMALL_DISK`). Skipped if the system does not
/// let an ordinary user mount one.
fn on_a_small_disk(name: &str, test: impl FnOnce(&Path)) {
    if let Some(disk) = std::env::var_os("SMALL_DISK") {
        return test(Path::new(&disk));
    }
    let dir = tempfile::tempdir().unwrap();
    let mount = "mount -t tmpfs -o size=1m small \"$SMALL_DISK\" || exit 77; exec \"$0\" --exact \"$1\"";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", mount])
        .arg(std::env::current_exe().unwrap())
        .arg(name)
        .env("SMALL_DISK", dir.path())
        .output();
    let no_mounts = |stderr: &[u8]| String::from_utf8_lossy(stderr).starts_with("unshare");
    match output {
        Ok(o) if o.status.success() => {}
        Ok(o) if o.status.code() == Some(77) || no_mounts(&o.stderr) => skip::skip("no mounts here"),
        Ok(o) => panic!("{}", String::from_utf8_lossy(&o.stdout)),
        Err(e) => skip::skip(format_args!("no unshare here: {e}")),
    }
}

#[test]
fn a_full_disk_is_found_before_the_work() {
    on_a_small_disk("a_full_disk_is_found_before_the_work", |disk| {
        let path = disk.join("out.safetensors");
        let rows = |n| ResultLayout::new(vec![("output".into(), vec![n, 1024])]).unwrap();
        let first = OutputFile::create(&path, &rows(150)).unwrap();
        // The first file's space is reserved before any write.
        let second = OutputFile::create(&disk.join("second"), &rows(150)).unwrap_err();
        assert_line(&second, &["cannot write", "second", &format!("needs {} bytes", rows(150).len_bytes()), "free"]);
        first.publish().unwrap();
        assert_eq!(names_in(disk), ["out.safetensors"]);
    });
}

#[test]
fn a_write_that_fails_names_file_and_tensor() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let layout = layout().for_path(Path::new("results/out.safetensors"));
    let error = layout.write_rows(&full, "grad.w", 0, &[0.0; 8]).unwrap_err();
    assert_line(&error, &["results/out.safetensors", "grad.w", "No space left"]);
    assert_line(&layout.write_header(&full).unwrap_err(), &["results/out.safetensors", "No space left"]);
}

#[test]
fn writes_outside_a_tensor_are_refused() {
    let layout = layout();
    let out = OutputFile::in_memory(&layout).unwrap();
    for (name, row, len) in
        [("output", 4, 6), ("output", 6, 0), ("output", 0, 2), ("output", usize::MAX, 3), ("no", 0, 0)]
    {
        let error = layout.write_rows(out.file(), name, row, &vec![1.0; len]).unwrap_err();
        assert_line(&error, &[name]);
    }
    assert!(layout.read(out.file(), "output").unwrap().iter().all(|&x| x == 0.0));
}

#[test]
fn layouts_that_cannot_be() {
    let new = |t: &[(&str, &[usize])]| ResultLayout::new(t.iter().map(|(n, s)| ((*n).into(), s.to_vec())).collect());
    assert_line(&new(&[("a", &[2]), ("b", &[1]), ("a", &[2])]).unwrap_err(), &["a comes twice"]);
    assert_line(&new(&[("a", &[usize::MAX, 2])]).unwrap_err(), &["a", "too large"]);
    assert_line(&new(&[("a", &[1 << 60]), ("b", &[1 << 60])]).unwrap_err(), &["too large"]);
}

#[test]
fn short_reads_of_a_result_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "short").unwrap();
    let file = File::open(dir.path().join("f")).unwrap();
    assert_line(&layout().read(&file, "output").unwrap_err(), &["output", "the result file"]);
}
