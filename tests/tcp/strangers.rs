//! Processes outside the job at its rendezvous: before PE 0, in its place, and many at once.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::geteuid;

use super::binary::{Running, run, start};
use super::{SMALL, Test, aristos, here, skip, start_all, wait_until_joined};

const TOKEN: &str = "a token that is never sent";

fn with_token(mut commands: Vec<Command>) -> Vec<Command> {
    commands.iter_mut().for_each(|command| _ = command.env("ARISTOS_JOB_TOKEN", TOKEN));
    commands
}

/// HOST:PORT of a job's rendezvous.
fn rendezvous(commands: &[Command]) -> String {
    commands[0].get_args().last().unwrap().to_str().unwrap().to_string()
}

/// The command, with at most `files` open files.
fn with_open_files(command: &Command, files: usize) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")]).arg(command.get_program());
    limited.args(command.get_args()).current_dir(env!("CARGO_MANIFEST_DIR"));
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    limited
}

/// Processes of another user that connect in a loop until this value is dropped.
struct Storm(Vec<Child>);

impl Storm {
    /// Starts the processes. Each connection sends `kind`: nothing, before it closes at once; or a valid hello, after which it stays
    /// open. Returns `None` if this process may not become another user.
    fn of(processes: usize, kind: &str, port: &str) -> Option<Storm> {
        if !geteuid().is_root() {
            return None;
        }
        // The script changes its user itself, because the other user may not be able to execute the interpreter.
        let script = "import os, socket, struct, sys, time\nkind, port = sys.argv[1], int(sys.argv[2])\nos.setgroups([])\n\
            os.setgid(65534)\nos.setuid(65534)\nkept = []\n\
            body = struct.pack('<5I', 2, 1, 2, 1, 2) + bytes(32) + b'abc'\n\
            hello = struct.pack('<IIQ', 1, 0, len(body)) + body\nwhile True:\n    \
            one = socket.socket()\n    one.settimeout(1)\n    \
            try:\n        one.connect(('127.0.0.1', port))\n        \
            if kind == 'hello': one.sendall(hello)\n        \
            kept.append(one)\n    \
            except OSError: one.close()\n    \
            while len(kept) > (50 if kind == 'hello' else 0): kept.pop(0).close()\n";
        let one = |_| Command::new("python3").args(["-c", script, kind, port]).spawn().unwrap();
        Some(Storm((0..processes).map(one).collect()))
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        let ended: Vec<_> = self.0.iter_mut().filter_map(|child| child.try_wait().transpose()).collect();
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
        // A process that ended early means that the test had less load than intended.
        assert!(ended.is_empty() || thread::panicking(), "{ended:?}");
    }
}

pub const TESTS: &[Test] = &[
    ("here::process_in_place_of_pe_0_learns_no_token", || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        let thief = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut said = vec![0; 4096];
            let bytes = stream.read(&mut said).unwrap();
            said.truncate(bytes);
            // The reply of a PE 0 that admits the caller, with a false proof.
            let _ = stream.write_all(&[&4u32.to_le_bytes()[..], &[0; 4], &32u64.to_le_bytes(), &[0; 32]].concat());
            let more = stream.read_to_end(&mut said).unwrap_or(0);
            (said, more)
        });
        let args = format!("run {SMALL} --transport tcp --rank 1 --ranks 2 --rendezvous {place}");
        let mut command = aristos(args.split_whitespace());
        command.env("ARISTOS_JOB_TOKEN", TOKEN);
        let begun = Instant::now();
        command.env("ARISTOS_JOIN_LIMIT", "2");
        run(command).refused(&["cannot meet the other PEs: ", &place]);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        let (said, more) = thief.join().unwrap();
        assert!(said.len() > 52 && more == 0, "{} bytes, {more} after the false admission", said.len());
        assert!(!said.windows(TOKEN.len()).any(|bytes| bytes == TOKEN.as_bytes()));
    }),
    ("here::byte_now_and_then_holds_no_pe_past_its_limit", || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let answer = [&2u32.to_le_bytes()[..], &[0; 4], &64u64.to_le_bytes(), &[0; 64]].concat();
            for byte in answer {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_secs(1));
            }
        });
        let args = format!("run {SMALL} --transport tcp --rank 1 --ranks 2 --rendezvous {place}");
        let mut command = aristos(args.split_whitespace());
        let begun = Instant::now();
        command.env("ARISTOS_JOIN_LIMIT", "2");
        run(command).refused(&["cannot meet the other PEs: PE 0 has not answered"]);
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }),
    ("here::few_open_files_suffice_among_silent_strangers", || {
        for files in [24, 64] {
            let commands = with_token(here(2, &format!("run {SMALL} --check")));
            let place = rendezvous(&commands).replace("localhost", "127.0.0.1");
            let zero = start(with_open_files(&commands[0], files));
            let begun = Instant::now();
            let first = loop {
                match TcpStream::connect(&place) {
                    Ok(stream) => break stream,
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "PE 0 does not listen");
            };
            let strangers: Vec<TcpStream> = (0..200).map_while(|_| TcpStream::connect(&place).ok()).collect();
            let one = start(with_open_files(&commands[1], files));
            let outcome = zero.end();
            assert!(outcome.status.success() && outcome.stdout.contains("check passed"), "{files}: {outcome:?}");
            one.end().success();
            drop((first, strangers));
        }
    }),
    ("here::another_user_with_many_processes_neither_joins_nor_delays_nor_ends_a_job", || {
        const PROCESSES: usize = 12;
        // A job whose last process starts while strangers flood the rendezvous; returns the time that this process takes to join.
        let time = |kind: Option<&str>| -> Option<Duration> {
            let mut commands = with_token(here(2, &format!("run {SMALL} --check")));
            let place = rendezvous(&commands);
            let late = commands.pop().unwrap();
            let zero: Running = start_all(commands).remove(0);
            let storm = match kind {
                Some(kind) => Some(Storm::of(PROCESSES, kind, place.rsplit_once(':').unwrap().1)?),
                None => None,
            };
            thread::sleep(Duration::from_secs(1));
            let one = start(late);
            let took = wait_until_joined(&one);
            // From here on the flood would only take CPU time from the job.
            drop(storm);
            let outcome = zero.end();
            one.end().success();
            assert!(outcome.status.success() && outcome.stdout.contains("check passed"), "{outcome:?}");
            assert!(outcome.stderr.lines().count() <= 8, "{outcome:?}");
            Some(took)
        };
        for kind in ["close", "hello"] {
            let Some(stormed) = time(Some(kind)) else { return skip::skip("not root: there is no second user") };
            println!("{kind}: joined after {stormed:?}, without a storm after {:?}", time(None));
            assert!(stormed < Duration::from_secs(10), "{kind}: {stormed:?}");
        }
    }),
];
