//! The progress thread: reads all connections, and writes queued frames.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventFlags};
use rustix::io::{Errno, retry_on_intr};

use super::frame::{Header, Kind, MAX_MESSAGE_BYTES};
use super::inbox::{Inbox, Received, Sink};
use super::liveness::silent_for;
use super::mesh::{Mesh, WAKE, Wanted, lock};
use super::outbox::Body;
use crate::Segment;
use crate::doorbell::{ring, signal};

/// Maximum reads from one connection before the next is served.
const READS: usize = 16;
/// Maximum events per call of epoll.
const EVENTS: usize = 64;

/// The reason why a peer's stream is invalid, half a line.
struct Invalid(String);

/// Time between checks for silent hosts.
const LOOK_AFTER: Duration = Duration::from_millis(500);

/// Runs until `stop` is set; a PE whose host has been silent for longer than `limit` is lost.
pub(super) fn run(mesh: &Mesh, limit: Duration) {
    let mut inboxes: Vec<Inbox> = mesh.peers.iter().map(|_| Inbox::new()).collect();
    let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
    let look_after = Timespec::try_from(LOOK_AFTER).expect("half a second");
    let mut looked = Instant::now();
    while !mesh.stop.load(Ordering::SeqCst) {
        events.clear();
        let waited = retry_on_intr(|| {
            epoll::wait(mesh.epoll.as_fd(), rustix::buffer::spare_capacity(&mut events), Some(&look_after))
        });
        if let Err(error) = waited {
            mesh.lose(mesh.me, format!("epoll has failed: {error}"));
            return;
        }
        if looked.elapsed() >= LOOK_AFTER {
            looked = Instant::now();
            find_silent_hosts(mesh, limit);
        }
        for event in &events {
            let pe = match event.data.u64() {
                WAKE => continue,
                pe => pe as usize,
            };
            let flags = event.flags;
            if flags.contains(EventFlags::OUT) {
                mesh.flush(pe);
            }
            if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
                read(mesh, pe, &mut inboxes[pe]);
            }
        }
    }
}

fn find_silent_hosts(mesh: &Mesh, limit: Duration) {
    for (pe, peer) in mesh.others() {
        let silent = silent_for(&peer.socket);
        if silent > limit && !peer.ended.load(Ordering::SeqCst) {
            mesh.end(pe, &format!("its host has acknowledged nothing for {} s", silent.as_secs()));
        }
    }
}

/// Reads from `pe`, and carries out the complete frames.
fn read(mesh: &Mesh, pe: usize, inbox: &mut Inbox) {
    let socket = &mesh.peer(pe).socket;
    for _ in 0..READS {
        match inbox.receive(socket) {
            Ok(Received::Bytes) => {}
            Ok(Received::Nothing) => return,
            Ok(Received::End) => {
                let cut = if inbox.is_between_frames() { "" } else { " within a frame" };
                return mesh.end(pe, &format!("its connection has ended{cut}"));
            }
            Err(Errno::CONNRESET) => return mesh.end(pe, "its connection has ended"),
            Err(error) => return mesh.end(pe, &format!("its connection has failed: {error}")),
        }
        if let Err(Invalid(what)) = carry_out_all(mesh, pe, inbox) {
            // The rest of the stream is not read.
            return mesh.end(pe, &format!("it sent an invalid frame, {what}"));
        }
    }
}

fn carry_out_all(mesh: &Mesh, pe: usize, inbox: &mut Inbox) -> Result<(), Invalid> {
    let no_header = || Invalid("which begins with no header".to_string());
    while let Some((header, body)) = inbox.next(|header| place(mesh, pe, header), no_header)? {
        carry_out(mesh, pe, &header, body)?;
    }
    Ok(())
}

/// The destination of a frame's body, after all offsets of the frame have been checked.
fn place(mesh: &Mesh, pe: usize, header: &Header) -> Result<Sink, Invalid> {
    if header.needs_heap() {
        let window = heap(mesh, header)?;
        if !header.fits(window.heap_bytes()) {
            let Header { kind, at, bytes, signal, .. } = header;
            return Err(Invalid(format!(
                "{kind:?} of {bytes} bytes at offset {at}, signal at offset {signal}, outside of the heap of {} bytes",
                window.heap_bytes()
            )));
        }
        if header.body_bytes() > 0 {
            return Ok(Sink::Heap(window, header.at as usize));
        }
    }
    match header.kind {
        Kind::GotBytes => match lock(&mesh.received).wanted.get(&header.value) {
            Some((of, Wanted::Bytes(bytes))) if *of == pe && *bytes as u64 == header.bytes => {
                Ok(Sink::Buffer(vec![0; *bytes]))
            }
            Some((of, Wanted::Heap(segment, at, bytes))) if *of == pe && *bytes as u64 == header.bytes => {
                Ok(Sink::Heap(segment.clone(), *at))
            }
            _ => Err(Invalid(format!("an answer of {} bytes that nobody waits for", header.bytes))),
        },
        Kind::Message | Kind::Lost if header.bytes > MAX_MESSAGE_BYTES => {
            Err(Invalid(format!("a message of {} bytes", header.bytes)))
        }
        Kind::Message | Kind::Lost => Ok(Sink::Buffer(vec![0; header.bytes as usize])),
        _ => Ok(Sink::Buffer(Vec::new())),
    }
}

fn heap(mesh: &Mesh, header: &Header) -> Result<Arc<Segment>, Invalid> {
    mesh.window().ok_or_else(|| Invalid(format!("{:?} where there is no symmetric heap", header.kind)))
}

/// Carries out a complete frame; a body for the heap is already in it.
fn carry_out(mesh: &Mesh, pe: usize, header: &Header, body: Vec<u8>) -> Result<(), Invalid> {
    let peer = mesh.peer(pe);
    let &Header { at, bytes, value, op, .. } = header;
    let mut answer = None;
    match header.kind {
        Kind::Put => {}
        Kind::PutSignal | Kind::Signal => {
            let window = heap(mesh, header)?;
            signal(window.atomic_u64(header.signal as usize), value, op, window.bell());
        }
        Kind::Get => {
            let window = heap(mesh, header)?;
            let got = Header { bytes, value, ..Header::of(Kind::GotBytes) };
            mesh.send(pe, got, Body::Heap(&window, at as usize, bytes as usize));
        }
        Kind::FetchAdd => {
            let window = heap(mesh, header)?;
            let was = window.atomic_u64(header.signal as usize).fetch_add(value, Ordering::AcqRel);
            ring(window.bell());
            mesh.send(pe, Header { at, value: was, ..Header::of(Kind::GotWord) }, Body::Bytes(&[]));
        }
        Kind::GotBytes | Kind::GotWord => {
            let (question, bytes) = match header.kind {
                Kind::GotBytes => (value, body),
                _ => (at, value.to_le_bytes().to_vec()),
            };
            let mut state = lock(&mesh.received);
            match state.wanted.remove(&question) {
                Some((_, Wanted::Bytes(wanted))) if wanted == bytes.len() => _ = state.answers.insert(question, bytes),
                // The answer is in the heap, or the asking thread has given up.
                _ => {}
            }
        }
        Kind::Ask => answer = Some(Kind::Answer),
        Kind::Answer => {}
        Kind::Message => lock(&mesh.received).messages.entry(at).or_default().push_back((pe, body)),
        Kind::Lost => mesh.lose(at as usize, String::from_utf8_lossy(&body)),
        Kind::Bye => peer.bye.store(true, Ordering::SeqCst),
    }
    peer.carried_out.fetch_add(1, Ordering::SeqCst);
    raise(&peer.acknowledged, header.carried_out);
    if let Some(kind) = answer {
        mesh.send(pe, Header::of(kind), Body::Bytes(&[]));
    }
    mesh.notify();
    Ok(())
}

/// Frames arrive in order, so this only grows.
fn raise(word: &AtomicU64, value: u64) {
    word.fetch_max(value, Ordering::SeqCst);
}
