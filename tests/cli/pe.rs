//! The request of a PE: a PE's process gets no user flags, and refuses requests of another version.

use std::fs::{self, File};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use aristos::job::launch::VERSION;
use aristos::shmem::Segment;
use aristos::shmem::control::frame::Kind;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;

use crate::binary::{aristos, aristos_run, run, start};

#[test]
fn command_line_of_a_pe_has_no_user_flags() {
    let out = tempfile::tempdir().unwrap();
    let mut command = aristos_run("--pes 2 --tokens 64 --hidden 32 --intermediate 32 --steps 100000000 --seed 5");
    command.arg("--output").arg(out.path().join("out.safetensors"));
    let mut running = start(command);
    for pe in 0..2 {
        let pid = running.pe(pe).as_raw_pid();
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        let words: Vec<&str> = line.split(|b| *b == 0).map(|word| std::str::from_utf8(word).unwrap()).collect();
        assert!(matches!(words[..], [program, "pe", ""] if program.ends_with("aristos")), "{words:?}");
    }
    running.signal(Signal::TERM);
    running.end().refused(&["interrupted by SIGTERM"]);
}

#[test]
fn pe_without_a_supervisor_is_an_error() {
    run(aristos(["pe"])).refused(&["PEs that a supervisor starts"]);
    run(aristos(["pe", "--steps", "3"])).misused(&["'--steps'"]);
    assert!(!run(aristos(["--help"])).success().stdout.contains("\n  pe "), "it is shown to nobody");
}

/// Starts a PE as its supervisor, sends it the request, and returns the error that it reports.
fn answer_to(request: &str) -> String {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut command = aristos(["pe"]);
    command.env("ARISTOS_PE", "0").env("ARISTOS_N_PES", "1").env("ARISTOS_SUPERVISOR", std::process::id().to_string());
    let mut child = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().unwrap();
    drop(command);

    let page = Segment::create("status", 64).unwrap();
    let file = File::from(rustix::fs::memfd_create("request", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(request.as_bytes(), 0).unwrap();
    let mut frame = [0; 16];
    frame[..4].copy_from_slice(&(Kind::Files as u32).to_le_bytes());
    frame[4..8].copy_from_slice(&2u32.to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [page.fd(), file.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(&ours, &[IoSlice::new(&frame)], &mut ancillary, SendFlags::empty()).unwrap();

    let mut said = Vec::new();
    (&ours).read_to_end(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    // The first frame holds the process id.
    let (running, fail) = said.split_at(16 + 4);
    let kind = |frame: &[u8]| u32::from_le_bytes(*frame.first_chunk().unwrap());
    assert_eq!((kind(running), kind(fail)), (Kind::Running as u32, Kind::Fail as u32));
    String::from_utf8(fail[16..].to_vec()).unwrap()
}

#[test]
fn request_of_another_version_is_an_error() {
    let ours = env!("CARGO_PKG_VERSION");
    let request = |version: u32, program: &str| {
        answer_to(&format!(r#"{{"version":{version},"program":"{program}","request":{{"fly":{{"to":"the moon"}}}}}}"#))
    };
    let refusal = |version: u32, program: &str| {
        format!(
            "the request is of aristos {program} (protocol {version}), this PE is aristos {ours} (protocol {VERSION}): all must be the \
             same"
        )
    };
    assert_eq!(request(VERSION + 1, "7.0.0"), refusal(VERSION + 1, "7.0.0"));
    assert_eq!(request(VERSION - 1, ours), refusal(VERSION - 1, ours));
    assert_eq!(request(VERSION, "0.0.1"), refusal(VERSION, "0.0.1"));
    // An unknown request of this version.
    assert!(request(VERSION, ours).starts_with("the request cannot be read: unknown variant `fly`"));
    assert!(answer_to("run --steps 3").starts_with("the request cannot be read: "));
}
