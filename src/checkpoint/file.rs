//! A safetensors file: the header is parsed and checked once, tensors are read on demand.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use super::FileError;
use super::header::{self, HeaderError, MAX_HEADER_BYTES, Tensors};

// Numbers in a safetensors file are little-endian and are not converted.
#[cfg(target_endian = "big")]
compile_error!("safetensors files are read and written on little-endian machines only");

/// Bytes converted at a time if the stored type is not f32.
const CHUNK_BYTES: usize = 1 << 18;

/// An open safetensors file.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    file: File,
    /// Offset of the data in the file, bytes.
    data_start: u64,
    tensors: Tensors,
}

impl TensorFile {
    /// Opens `path` and checks its header: every tensor's byte range matches its shape and lies within the file.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file, and the tensor if the fault concerns one.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        let no_tensors = |why: String| FileError::malformed(path, format!("is not a safetensors file: {why}"));
        let file = open_regular(path).map_err(|e| FileError::system(format!("open {}", path.display()), e))?;
        let file_bytes = file.metadata().map_err(|e| FileError::read(path, e))?.len();
        if file_bytes < 8 {
            return Err(no_tensors(format!("{file_bytes} bytes, too short for a header")));
        }
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(|e| FileError::read(path, e))?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(no_tensors(format!("a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} fit")));
        }
        let data_start = 8 + header_bytes;
        if data_start > file_bytes {
            let what = format!("is truncated: its header ends at byte {data_start}, the file at byte {file_bytes}");
            return Err(FileError::malformed(path, what));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(|e| FileError::read(path, e))?;
        let tensors = header::parse(&header, file_bytes - data_start).map_err(|error| match error {
            HeaderError::Whole(why) => no_tensors(why),
            HeaderError::Entry(name, why) => FileError::part(path, format!("header of tensor {name}: {why}")),
            HeaderError::Tensor(name, why) => FileError::part(path, format!("tensor {name}: {why}")),
        })?;
        Ok(TensorFile { path: path.to_owned(), file, data_start, tensors })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of tensor `name`; `None` if the file has no such tensor.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| info.shape.as_slice())
    }

    /// Checks that tensor `name` exists, has shape `shape`, and a type that [`TensorFile::read_f32`] supports.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file, the tensor, and the actual and expected shape or type.
    pub(super) fn expect(&self, name: &str, shape: &[usize]) -> Result<(), FileError> {
        let info = self.info(name)?;
        if info.shape != shape {
            return Err(self.wrong(name, format!("has shape {:?}", info.shape), format!("{shape:?}")));
        }
        self.expect_float(name)
    }

    /// Checks that tensor `name` exists and has a type that [`TensorFile::read_f32`] supports.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file, the tensor and its type.
    pub(super) fn expect_float(&self, name: &str) -> Result<(), FileError> {
        match self.info(name)?.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F64 => Ok(()),
            other => Err(self.wrong(name, format!("is {other}"), "F32, BF16, F16 or F64".into())),
        }
    }

    /// Reads elements `first..first + len` of tensor `name` in row-major order, as f32: exact for F32, BF16 and F16,
    /// rounded to nearest for F64.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the tensor if the tensor does not exist, has another type, or was
    /// truncated since the file was opened.
    ///
    /// # Panics
    ///
    /// If the range exceeds the tensor.
    pub(super) fn read_f32(&self, name: &str, first: usize, len: usize) -> Result<Vec<f32>, FileError> {
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

    /// The type of tensor `name`; `None` if the file has no such tensor.
    pub(super) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.tensors.get(name).map(|info| info.dtype)
    }

    /// Checks that tensor `name` exists, and has this one-byte type and this shape.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file, the tensor, and the actual and expected shape or type.
    pub(super) fn expect_bytes(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<(), FileError> {
        let info = self.info(name)?;
        if info.dtype != dtype || info.shape != shape {
            let found = format!("is {} of shape {:?}", info.dtype, info.shape);
            return Err(self.wrong(name, found, format!("{dtype} of shape {shape:?}")));
        }
        Ok(())
    }

    /// Reads elements `elements` of tensor `name`, which has one byte per element. Errors are those of
    /// [`TensorFile::read_f32`].
    ///
    /// # Panics
    ///
    /// If the range exceeds the tensor, or if elements have several bytes.
    pub(super) fn read_bytes(&self, name: &str, elements: Range<usize>) -> Result<Vec<u8>, FileError> {
        let info = self.info(name)?;
        let total: usize = info.shape.iter().product();
        assert!(info.dtype.bitsize() == 8 && elements.start <= elements.end && elements.end <= total, "{name}");
        let mut bytes = vec![0; elements.len()];
        self.read_exact(name, &mut bytes, self.data_start + (info.data_offsets.0 + elements.start) as u64)?;
        Ok(bytes)
    }

    /// Reads rows `rows` of the two-dimensional tensor `name`. Errors and panics are those of [`TensorFile::read_f32`].
    pub(super) fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, FileError> {
        let width: usize = self.info(name)?.shape[1..].iter().product();
        self.read_f32(name, rows.start * width, rows.len() * width)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, FileError> {
        self.tensors.get(name).ok_or_else(|| FileError::no_tensor(&self.path, name))
    }

    /// An error about tensor `name`.
    pub(super) fn wrong(&self, name: &str, found: String, expected: String) -> FileError {
        FileError::Tensor { file: self.path.clone(), tensor: name.to_string(), found, expected }
    }

    fn read_exact(&self, name: &str, buf: &mut [u8], at: u64) -> Result<(), FileError> {
        self.file.read_exact_at(buf, at).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                FileError::malformed(&self.path, format!("was cut short while tensor {name} was being read"))
            }
            _ => FileError::system(format!("read tensor {name} of {}", self.path.display()), e),
        })
    }
}

/// The multi-dimensional index of element `element` of a tensor of this shape.
pub(super) fn index_of(shape: &[usize], mut element: usize) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&size| {
            let at = element % size.max(1);
            element /= size.max(1);
            at
        })
        .collect();
    index.reverse();
    index
}

/// Opens a regular file for reading. Checks the type first, because opening a named pipe would block until it has a
/// writer.
fn open_regular(path: &Path) -> io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    File::open(path)
}

/// Reads a regular file of at most `max_bytes`.
pub(super) fn read_regular(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let len = file.metadata()?.len();
    if len > max_bytes {
        return Err(io::Error::other(format!("it has {len} bytes, at most {max_bytes} are read")));
    }
    // Reads at most the reported size: some system files report size 0 and never end.
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}
