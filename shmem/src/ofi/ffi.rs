//! libfabric's endpoint, completion queue and registered heap as one value: [`Fabric`]. `shim.c` contains all calls.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use super::OfiError;
use crate::Segment;

const ADDRESS_BYTES: usize = 256;
const NAME_BYTES: usize = 64;
const TEXT_BYTES: usize = 128;
/// Maximum completions per call.
const MAX_COMPLETIONS: usize = 16;

#[repr(C)]
struct RawOfi {
    _private: [u8; 0],
}

#[repr(C)]
struct RawFacts {
    provider: [c_char; NAME_BYTES],
    address: [u8; ADDRESS_BYTES],
    address_bytes: u64,
    base: u64,
    key: u64,
    max_message_bytes: u64,
    protocol: u32,
    protocol_version: u32,
    fd: i32,
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    /// Copies bytes to the target.
    Write = 0,
    /// Copies bytes from the target.
    Read,
    /// Replaces a word.
    Set,
    /// Adds to a word.
    Add,
    /// Adds to a word and returns its previous value.
    FetchAdd,
    /// A marker that is never posted.
    Marker,
}

impl Kind {
    /// Name of the libfabric function.
    pub(super) fn call(self) -> &'static str {
        match self {
            Kind::Write => "fi_write",
            Kind::Read => "fi_read",
            Kind::Set | Kind::Add => "fi_atomic",
            Kind::FetchAdd => "fi_fetch_atomic",
            Kind::Marker => "marker",
        }
    }
}

#[repr(C)]
pub(super) struct RawOp {
    pub(super) kind: u32,
    pub(super) to: u64,
    pub(super) at: u64,
    pub(super) key: u64,
    pub(super) buffer: *mut c_void,
    pub(super) bytes: u64,
    pub(super) result: *mut c_void,
    pub(super) context: *mut c_void,
}

#[repr(C)]
struct RawDone {
    context: *mut c_void,
    error: i32,
    text: [c_char; TEXT_BYTES],
}

unsafe extern "C" {
    fn aristos_ofi_load() -> *const c_char;
    fn aristos_ofi_open(
        provider: *const c_char,
        node: *const c_char,
        choice: u64,
        heap: *mut c_void,
        heap_bytes: u64,
        key: u64,
        n_pes: u64,
        made: *mut *mut RawOfi,
        facts: *mut RawFacts,
        call: *mut *const c_char,
    ) -> c_int;
    fn aristos_ofi_insert(ofi: *mut RawOfi, address: *const c_void, to: *mut u64) -> c_int;
    fn aristos_ofi_post(ofi: *mut RawOfi, op: *const RawOp) -> c_int;
    fn aristos_ofi_poll(ofi: *mut RawOfi, done: *mut RawDone, most: u64) -> c_int;
    fn aristos_ofi_trywait(ofi: *mut RawOfi) -> c_int;
    fn aristos_ofi_close(ofi: *mut RawOfi);
    fn aristos_ofi_strerror(error: c_int) -> *const c_char;
    static aristos_ofi_eagain: c_int;
    static aristos_ofi_enodata: c_int;
}

/// Loads the library once.
fn load() -> Result<(), OfiError> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        // SAFETY: called once, by one thread, before any other function of the shim; returns null or a string.
        match unsafe { text(aristos_ofi_load()) } {
            why if why.is_empty() => Ok(()),
            why => Err(why),
        }
    });
    loaded.clone().map_err(|why| {
        OfiError::Unsuitable(format!(
            "cannot load libfabric ({why}): install it (Debian: libfabric1), or load its module, which sets LD_LIBRARY_PATH"
        ))
    })
}

/// libfabric's text for an error number of either sign.
fn strerror(error: c_int) -> String {
    // SAFETY: returns a constant string of the library.
    unsafe { text(aristos_ofi_strerror(error.saturating_abs())) }
}

/// # Safety
/// `at` is null or a NUL-terminated string.
unsafe fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

/// Converts a NUL-terminated string in a buffer.
fn text_of(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The data with which other PEs check compatibility and access this PE's heap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EndpointInfo {
    /// Address of the heap's start in remote operations.
    pub(super) base: u64,
    pub(super) key: u64,
    pub(super) protocol: (u32, u32),
    pub(super) address: Vec<u8>,
    pub(super) provider: String,
}

impl EndpointInfo {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [self.base.to_le_bytes(), self.key.to_le_bytes()].concat();
        let (protocol, version) = self.protocol;
        for number in [protocol, version, self.address.len() as u32] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(&self.address);
        bytes.extend(self.provider.as_bytes());
        bytes
    }

    /// Returns `None` for malformed bytes.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<EndpointInfo> {
        let (base, rest) = bytes.split_first_chunk()?;
        let (key, rest) = rest.split_first_chunk()?;
        let (protocol, rest) = rest.split_first_chunk()?;
        let (version, rest) = rest.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (address, provider) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        Some(EndpointInfo {
            base: u64::from_le_bytes(*base),
            key: u64::from_le_bytes(*key),
            protocol: (u32::from_le_bytes(*protocol), u32::from_le_bytes(*version)),
            address: address.to_vec(),
            provider: String::from_utf8(provider.to_vec()).ok()?,
        })
    }
}

/// The outcome of posting an operation.
pub(super) enum PostResult {
    /// The operation was posted.
    Posted,
    /// To be retried: the provider has no room or no connection yet.
    Retry,
    /// Rejected, with the reason.
    Refused(String),
}

/// A completed operation.
pub(super) struct Done {
    /// The address with which it was posted; 0 if it does not belong to an operation.
    pub(super) context: usize,
    /// The reason of a failure.
    pub(super) error: Option<String>,
}

/// Selects an endpoint.
pub(super) struct Choice<'a> {
    /// libfabric's name of the provider.
    pub(super) provider: &'a str,
    /// This host's address, for providers whose networks have IP addresses.
    pub(super) node: Option<IpAddr>,
    /// Otherwise the index of the network, modulo their number.
    pub(super) network: usize,
    /// The heap's key, if the provider lets the application choose it.
    pub(super) key: u64,
    pub(super) n_pes: usize,
}

/// An endpoint, its completion queue, and the registered heap.
pub(super) struct Fabric {
    raw: NonNull<RawOfi>,
    /// Descriptor that signals completions.
    fd: Option<c_int>,
    max_message_bytes: usize,
    /// Keeps the registered memory mapped.
    _heap: Arc<Segment>,
}

// SAFETY: libfabric's objects are not bound to a thread; `&mut self` provides FI_THREAD_DOMAIN, one thread at a time.
unsafe impl Send for Fabric {}

impl Fabric {
    /// Opens an endpoint. Returns `Ok(None)` if the provider is missing or lacks a required feature.
    pub(super) fn open(choice: &Choice<'_>, heap: &Arc<Segment>) -> Result<Option<(Fabric, EndpointInfo)>, OfiError> {
        load()?;
        let refuse = |call: String, why: String| OfiError::Fabric { provider: choice.provider.to_string(), call, why };
        let provider = CString::new(choice.provider)
            .map_err(|_| refuse("fi_getinfo".to_string(), "a name has no zero byte".to_string()))?;
        let node = choice.node.map(|node| CString::new(node.to_string()).expect("digits and colons"));
        let start = heap.address(0, heap.heap_bytes());
        let mut raw = std::ptr::null_mut();
        let mut call = std::ptr::null();
        // SAFETY: the struct consists of integers, so all-zero bytes are valid.
        let mut facts: RawFacts = unsafe { std::mem::zeroed() };
        // SAFETY: the strings are NUL-terminated; the heap's mapping has this length and lives as long as the fabric, which
        // holds it; the out-pointers are valid.
        let error = unsafe {
            aristos_ofi_open(
                provider.as_ptr(),
                node.as_ref().map_or(std::ptr::null(), |node| node.as_ptr()),
                choice.network as u64,
                start.as_ptr().cast(),
                heap.heap_bytes() as u64,
                choice.key,
                choice.n_pes as u64,
                &mut raw,
                &mut facts,
                &mut call,
            )
        };
        // SAFETY: null or a string constant.
        let call = unsafe { text(call) };
        // SAFETY: reads a constant.
        if error == -unsafe { aristos_ofi_enodata } && call == "fi_getinfo" {
            return Ok(None);
        }
        let raw = match (error, NonNull::new(raw)) {
            (0, Some(raw)) => raw,
            (0, None) => return Err(refuse("fi_getinfo".to_string(), "it made nothing".to_string())),
            (error, _) => return Err(refuse(call, strerror(error))),
        };
        let provider = text_of(&facts.provider);
        let address = facts.address.get(..facts.address_bytes as usize).unwrap_or_default().to_vec();
        let info = EndpointInfo {
            base: facts.base,
            key: facts.key,
            protocol: (facts.protocol, facts.protocol_version),
            address,
            provider,
        };
        let max_message_bytes = usize::try_from(facts.max_message_bytes).unwrap_or(usize::MAX).max(1);
        let fd = Some(facts.fd).filter(|&fd| fd >= 0);
        Ok(Some((Fabric { raw, fd, max_message_bytes, _heap: heap.clone() }, info)))
    }

    /// Descriptor that signals completions, valid while this value lives; not all providers have one.
    pub(super) fn fd(&self) -> Option<c_int> {
        self.fd
    }

    /// Maximum bytes per operation.
    pub(super) fn max_message_bytes(&self) -> usize {
        self.max_message_bytes
    }

    /// Registers a PE's address, which is as long as this PE's; returns libfabric's handle for it.
    pub(super) fn insert(&mut self, address: &[u8]) -> Result<u64, String> {
        let mut padded = [0u8; ADDRESS_BYTES];
        let Some(place) = padded.get_mut(..address.len()) else {
            return Err(format!("an address of {} bytes", address.len()));
        };
        place.copy_from_slice(address);
        let mut to = 0;
        // SAFETY: `padded` has ADDRESS_BYTES, the maximum length of an address; writes `to`.
        match unsafe { aristos_ofi_insert(self.raw.as_ptr(), padded.as_ptr().cast(), &mut to) } {
            0 => Ok(to),
            error => Err(strerror(error)),
        }
    }

    /// Posts an operation.
    ///
    /// # Safety
    /// Until it completes or `self` is dropped: `buffer` is valid for `bytes` bytes (8 for an atomic), `result` (if used) for 8
    /// and `context` for 64; no other code accesses what libfabric writes or changes what it reads.
    pub(super) unsafe fn post(&mut self, op: &RawOp) -> PostResult {
        // SAFETY: the caller guarantees the pointers; the endpoint is open.
        match unsafe { aristos_ofi_post(self.raw.as_ptr(), op) } {
            0 => PostResult::Posted,
            // SAFETY: reads a constant.
            error if error == -unsafe { aristos_ofi_eagain } => PostResult::Retry,
            error => PostResult::Refused(strerror(error)),
        }
    }

    /// Progresses libfabric and appends completed operations to `done`; returns whether there may be more.
    pub(super) fn poll(&mut self, done: &mut Vec<Done>) -> Result<bool, String> {
        let empty = || RawDone { context: std::ptr::null_mut(), error: 0, text: [0; TEXT_BYTES] };
        let mut raw: [RawDone; MAX_COMPLETIONS] = std::array::from_fn(|_| empty());
        // SAFETY: writes at most `raw.len()` entries.
        let count = unsafe { aristos_ofi_poll(self.raw.as_ptr(), raw.as_mut_ptr(), raw.len() as u64) };
        let Ok(count) = usize::try_from(count) else { return Err(strerror(count)) };
        done.extend(raw.iter().take(count).map(|one| {
            let error = (one.error != 0).then(|| match (strerror(one.error), text_of(&one.text)) {
                (general, detail) if detail.is_empty() || detail == general => general,
                (general, detail) => format!("{general} ({detail})"),
            });
            Done { context: one.context.addr(), error }
        }));
        Ok(count > 0)
    }

    /// Whether the thread may sleep on the descriptor; false if there is work to do first.
    pub(super) fn may_wait(&mut self) -> bool {
        // SAFETY: the queue is open. It has a wait object if `fd` is set, which some providers dereference unchecked.
        self.fd.is_none() || unsafe { aristos_ofi_trywait(self.raw.as_ptr()) == 0 }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // SAFETY: open; last use.
        unsafe { aristos_ofi_close(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_info_survives_a_round_trip() {
        let provider = "tcp;ofi_rxm".to_string();
        let info = EndpointInfo { base: 1 << 40, key: 7, protocol: (3, 1), address: vec![1, 2, 3], provider };
        let bytes = info.to_bytes();
        assert_eq!(EndpointInfo::from_bytes(&bytes).as_ref(), Some(&info));
        assert_eq!(EndpointInfo::from_bytes(&bytes[..30]), None);
        assert_eq!(EndpointInfo::from_bytes(&[0xff; 64]), None);
    }
}
