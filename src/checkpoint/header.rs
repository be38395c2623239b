//! Parser of safetensors headers, which are untrusted.
//!
//! Accepts what the `safetensors` library accepts: tensors cover the data without gap or overlap, names are unique, and
//! no bytes follow the JSON object. Parses a stream with limits, so that no header needs much memory.

use std::collections::HashMap;
use std::fmt;

use safetensors::tensor::TensorInfo;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// Maximum header size. (The format allows three times as much; the largest published models have a tenth of it.)
pub(super) const MAX_HEADER_BYTES: u64 = 32 << 20;
/// Maximum number of tensors per file.
const MAX_TENSORS: usize = 250_000;

/// Tensors by name.
pub(super) type Tensors = HashMap<String, TensorInfo>;

/// Parses a header, and checks it against the `data_bytes` bytes that follow it.
///
/// # Errors
///
/// Returns an error that completes a message about the file.
pub(super) fn parse(header: &[u8], data_bytes: u64) -> Result<Tensors, HeaderError> {
    let mut wrong = None;
    let mut json = serde_json::Deserializer::from_slice(header);
    let tensors =
        json.deserialize_map(TensorsVisitor { wrong: &mut wrong }).and_then(|tensors| json.end().map(|()| tensors));
    let tensors = tensors.map_err(|error| match wrong {
        Some(wrong) => wrong,
        None => HeaderError::Whole(format!("its header is not a JSON object: {error}")),
    })?;
    for (name, info) in &tensors {
        check(info, data_bytes).map_err(|why| HeaderError::Tensor(name.clone(), why))?;
    }
    check_cover(&tensors, data_bytes)?;
    Ok(tensors)
}

/// A fault of a header.
#[derive(Debug)]
pub(super) enum HeaderError {
    /// The header is malformed, or does not match its file.
    Whole(String),
    /// An entry cannot be parsed: tensor and reason.
    Entry(String, String),
    /// An entry is invalid: tensor and reason.
    Tensor(String, String),
}

/// Visits the entries one by one.
struct TensorsVisitor<'w> {
    /// The fault of an entry, which an error of serde cannot carry.
    wrong: &'w mut Option<HeaderError>,
}

impl<'de> Visitor<'de> for TensorsVisitor<'_> {
    type Value = Tensors;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut entries: M) -> Result<Tensors, M::Error> {
        let mut tensors = Tensors::new();
        let mut stop = |wrong| {
            *self.wrong = Some(wrong);
            M::Error::custom("stopped")
        };
        while let Some(name) = entries.next_key::<String>()? {
            if name == "__metadata__" {
                entries.next_value::<Strings>()?;
                continue;
            }
            let info: TensorInfo = entries.next_value().map_err(|error| {
                // Removes the list of all known types that serde appends to an unknown one, and the position in the
                // file.
                let error = error.to_string();
                let error = error.split(", expected one of").next().unwrap_or(&error);
                stop(HeaderError::Entry(name.clone(), error.split(" at line ").next().unwrap_or(error).to_string()))
            })?;
            if tensors.len() == MAX_TENSORS {
                return Err(stop(HeaderError::Whole(format!("it has more than {MAX_TENSORS} tensors"))));
            }
            if tensors.contains_key(&name) {
                return Err(stop(HeaderError::Tensor(name, "it comes twice in the header".into())));
            }
            tensors.insert(name, info);
        }
        Ok(tensors)
    }
}

/// A map of strings that is validated and discarded.
struct Strings;

impl<'de> serde::Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Strings, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = Strings;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("strings by name in __metadata__")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut entries: M) -> Result<Strings, M::Error> {
                while entries.next_entry::<String, String>()?.is_some() {}
                Ok(Strings)
            }
        }
        deserializer.deserialize_map(StringsVisitor)
    }
}

/// Checks that an entry is consistent and lies within the file's data.
fn check(info: &TensorInfo, data_bytes: u64) -> Result<(), String> {
    let (begin, end) = info.data_offsets;
    if begin > end {
        return Err(format!("its bytes begin at {begin} and end at {end}"));
    }
    let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &d| n.checked_mul(d));
    let Some(bits) = bits else { return Err(format!("its shape {:?} overflows", info.shape)) };
    if !bits.is_multiple_of(8) || end - begin != bits / 8 {
        return Err(format!("{} bytes of data for shape {:?} of {}", end - begin, info.shape, info.dtype));
    }
    if end as u64 > data_bytes {
        return Err(format!("its bytes end at {end} of the data, the file has {data_bytes}: truncated"));
    }
    Ok(())
}

/// Checks that the tensors cover the data contiguously.
fn check_cover(tensors: &Tensors, data_bytes: u64) -> Result<(), HeaderError> {
    let mut in_order: Vec<(&String, (usize, usize))> =
        tensors.iter().map(|(name, info)| (name, info.data_offsets)).collect();
    in_order.sort_unstable_by_key(|(_, offsets)| *offsets);
    let (mut at, mut before): (usize, Option<&String>) = (0, None);
    for (name, (begin, end)) in in_order {
        if begin != at {
            let after = before.map_or("the header".to_string(), |name| format!("tensor {name}"));
            let how = if begin < at { "overlap those of" } else { "leave a gap after" };
            return Err(HeaderError::Tensor(
                name.clone(),
                format!("its bytes, from {begin} on, {how} {after}, which end at {at}"),
            ));
        }
        (at, before) = (end, Some(name));
    }
    if at as u64 != data_bytes {
        return Err(HeaderError::Whole(format!("its tensors end at byte {at} of the data, the file has {data_bytes}")));
    }
    Ok(())
}
