//! One safetensors file: its header parsed and checked once, its tensors read on demand.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

// Numbers in a safetensors file are little-endian, and are read as they lie.
#[cfg(target_endian = "big")]
compile_error!("safetensors files are read and written on little-endian machines only");

/// The format's own limit on the header (the `safetensors` crate has the same).
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes converted at a time where the stored type is not f32.
const CHUNK_BYTES: usize = 1 << 18;

/// An open safetensors file.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    file: File,
    /// Where the data begins, in bytes from the start of the file.
    data_start: u64,
    tensors: HashMap<String, TensorInfo>,
}

impl TensorFile {
    /// Opens `path` and checks its header: every tensor's shape fits its byte range, and every range lies in the file.
    ///
    /// # Errors
    /// One line that names the file, and the tensor where there is one.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let show = path.display();
        let file = open_regular(path).map_err(|e| anyhow!("cannot open {show}: {e}"))?;
        let file_bytes = file.metadata().map_err(|e| anyhow!("cannot read {show}: {e}"))?.len();
        if file_bytes < 8 {
            bail!("{show} is not a safetensors file: {file_bytes} bytes, too short for a header");
        }
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(|e| anyhow!("cannot read {show}: {e}"))?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > MAX_HEADER_BYTES {
            bail!("{show} is not a safetensors file: a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} fit");
        }
        let data_start = 8 + header_bytes;
        if data_start > file_bytes {
            bail!("{show} is truncated: its header ends at byte {data_start}, the file at byte {file_bytes}");
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(|e| anyhow!("cannot read {show}: {e}"))?;
        let entries: HashMap<String, serde_json::Value> = serde_json::from_slice(&header)
            .map_err(|e| anyhow!("{show} is not a safetensors file: its header is not a JSON object: {e}"))?;
        let mut tensors = HashMap::with_capacity(entries.len());
        for (name, entry) in entries {
            if name == "__metadata__" {
                continue;
            }
            let info: TensorInfo = serde_json::from_value(entry).map_err(|e| {
                // serde lists every known type behind an unknown one; the reader needs the unknown one.
                let e = e.to_string();
                anyhow!("{show}: header of tensor {name}: {}", e.split(", expected one of").next().unwrap_or(&e))
            })?;
            check_entry(&info, file_bytes - data_start).map_err(|e| anyhow!("{show}: tensor {name}: {e}"))?;
            tensors.insert(name, info);
        }
        Ok(TensorFile { path: path.to_owned(), file, data_start, tensors })
    }

    /// Where the file is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The shape of tensor `name`, `None` where the file has no such tensor.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| info.shape.as_slice())
    }

    /// Checks that tensor `name` is there, has shape `shape`, and a type that [`TensorFile::read_f32`] reads.
    ///
    /// # Errors
    /// One line that names the file and the tensor, what is there, and what is expected.
    pub(super) fn expect(&self, name: &str, shape: &[usize]) -> anyhow::Result<()> {
        let info = self.info(name)?;
        if info.shape != shape {
            bail!("{}: tensor {name} has shape {:?}, expected {shape:?}", self.path.display(), info.shape);
        }
        self.expect_float(name)
    }

    /// Checks that tensor `name` is there and has a type that [`TensorFile::read_f32`] reads.
    ///
    /// # Errors
    /// One line that names the file, the tensor and its type.
    pub(super) fn expect_float(&self, name: &str) -> anyhow::Result<()> {
        match self.info(name)?.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F64 => Ok(()),
            other => bail!("{}: tensor {name} is {other}, expected F32, BF16, F16 or F64", self.path.display()),
        }
    }

    /// Reads elements `first..first + len` of tensor `name` in row-major order, as f32: exact for F32, BF16 and F16,
    /// rounded to nearest for F64.
    ///
    /// # Errors
    /// One line that names the file and the tensor: not there, of another type, or cut short since it was opened.
    ///
    /// # Panics
    /// If the elements are not all in the tensor.
    pub(super) fn read_f32(&self, name: &str, first: usize, len: usize) -> anyhow::Result<Vec<f32>> {
        let info = self.info(name)?;
        let total: usize = info.shape.iter().product();
        assert!(first <= total && len <= total - first, "elements {first}+{len} of {total} in {name}");
        self.expect_float(name)?;
        let elem_bytes = info.dtype.bitsize() / 8;
        let mut out = vec![0f32; len];
        let start = self.data_start + (info.data_offsets.0 + first * elem_bytes) as u64;
        if info.dtype == Dtype::F32 {
            self.read_exact(name, bytemuck::cast_slice_mut(&mut out), start)?;
            return Ok(out);
        }
        let per_chunk = CHUNK_BYTES / elem_bytes;
        let mut buf = vec![0u8; len.min(per_chunk) * elem_bytes];
        for (i, chunk) in out.chunks_mut(per_chunk).enumerate() {
            let buf = &mut buf[..chunk.len() * elem_bytes];
            self.read_exact(name, buf, start + (i * per_chunk * elem_bytes) as u64)?;
            for (x, b) in chunk.iter_mut().zip(buf.chunks_exact(elem_bytes)) {
                *x = match *b {
                    [a, b] if info.dtype == Dtype::BF16 => bf16::from_le_bytes([a, b]).to_f32(),
                    [a, b] => f16::from_le_bytes([a, b]).to_f32(),
                    [a, b, c, d, e, f, g, h] => f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32,
                    _ => unreachable!("the types that expect_float lets through have 2, 4 or 8 bytes"),
                };
            }
        }
        Ok(out)
    }

    /// Reads rows `rows` of the two-dimensional tensor `name`; errors and panics as [`TensorFile::read_f32`].
    pub(super) fn read_rows(&self, name: &str, rows: Range<usize>) -> anyhow::Result<Vec<f32>> {
        let width: usize = self.info(name)?.shape[1..].iter().product();
        self.read_f32(name, rows.start * width, rows.len() * width)
    }

    fn info(&self, name: &str) -> anyhow::Result<&TensorInfo> {
        self.tensors.get(name).with_context(|| format!("{}: no tensor {name}", self.path.display()))
    }

    fn read_exact(&self, name: &str, buf: &mut [u8], at: u64) -> anyhow::Result<()> {
        self.file.read_exact_at(buf, at).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                anyhow!("{} was cut short while tensor {name} was being read", self.path.display())
            }
            _ => anyhow!("cannot read tensor {name} of {}: {e}", self.path.display()),
        })
    }
}

/// Opens a regular file to read. Looks before it opens: to open a named pipe would be to wait for its writer.
fn open_regular(path: &Path) -> io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    File::open(path)
}

/// The bytes of a regular file.
pub(super) fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Checks a header entry against itself and against the bytes of data that the file has.
fn check_entry(info: &TensorInfo, data_bytes: u64) -> anyhow::Result<()> {
    let (begin, end) = info.data_offsets;
    if begin > end {
        bail!("its bytes begin at {begin} and end at {end}");
    }
    let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &d| n.checked_mul(d));
    let Some(bits) = bits else { bail!("its shape {:?} overflows", info.shape) };
    if !bits.is_multiple_of(8) || end - begin != bits / 8 {
        bail!("{} bytes of data for shape {:?} of {}", end - begin, info.shape, info.dtype);
    }
    if end as u64 > data_bytes {
        bail!("its bytes end at {end} of the data, the file has {data_bytes}: truncated");
    }
    Ok(())
}
