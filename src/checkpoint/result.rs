//! The result file: a safetensors image with known names and shapes. The supervisor creates it, PEs fill it with
//! positional writes, and it gets its name only when it is complete.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::FileError;

/// Position of every tensor in a result file; the same on every PE that builds it from the same list.
#[derive(Debug, Clone)]
pub struct ResultLayout {
    /// The length prefix and the header, padded with spaces so that the data is 8-byte aligned.
    head: Vec<u8>,
    /// Shape, and offset in the file.
    tensors: HashMap<String, (Vec<usize>, u64)>,
    len_bytes: u64,
    /// The file's name in errors.
    label: PathBuf,
}

impl ResultLayout {
    /// A file of F32 tensors with these names and shapes, in this order.
    ///
    /// # Errors
    ///
    /// Returns an error if a name occurs twice or a size overflows.
    pub fn new(tensors: Vec<(String, Vec<usize>)>) -> Result<Self, FileError> {
        let mut infos = Vec::with_capacity(tensors.len());
        let mut offsets = HashMap::with_capacity(tensors.len());
        let mut at = 0usize;
        for (name, shape) in tensors {
            let end = shape.iter().try_fold(4usize, |n, &d| n.checked_mul(d)).and_then(|n| n.checked_add(at));
            // File offsets are signed, and the header needs some space.
            let Some(end) = end.filter(|&end| end < i64::MAX as usize / 2) else {
                return Err(FileError::Layout {
                    tensor: name,
                    what: format!(": shape {shape:?} is too large for a file"),
                });
            };
            if offsets.insert(name.clone(), (shape.clone(), at as u64)).is_some() {
                return Err(FileError::Layout { tensor: name, what: " comes twice".into() });
            }
            infos.push((name, TensorInfo { dtype: Dtype::F32, shape, data_offsets: (at, end) }));
            at = end;
        }
        let label = PathBuf::from("the result file");
        let metadata = Metadata::new(None, infos).map_err(|e| FileError::part(&label, e.to_string()))?;
        let mut head = vec![0; 8];
        serde_json::to_writer(&mut head, &metadata).map_err(|e| FileError::part(&label, e.to_string()))?;
        head.resize(head.len().next_multiple_of(8), b' ');
        let header_bytes = (head.len() - 8) as u64;
        head[..8].copy_from_slice(&header_bytes.to_le_bytes());
        for (_, first_byte) in offsets.values_mut() {
            *first_byte += head.len() as u64;
        }
        let len_bytes = (head.len() + at) as u64;
        Ok(ResultLayout { head, tensors: offsets, len_bytes, label })
    }

    /// Sets the file's name in errors to `path`.
    pub fn for_path(mut self, path: &Path) -> Self {
        self.label = path.to_path_buf();
        self
    }

    /// Size of the whole file in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Offset of tensor `name` in the file, bytes; `None` if there is no such tensor.
    pub fn offset_bytes(&self, name: &str) -> Option<u64> {
        self.tensors.get(name).map(|t| t.1)
    }

    /// Writes the header.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the system's error.
    pub fn write_header(&self, file: &File) -> Result<(), FileError> {
        file.write_all_at(&self.head, 0).map_err(|e| FileError::write(&self.label, e))
    }

    /// Writes whole rows of tensor `name` from row `first_row` on; a row is one index of the first dimension. Several
    /// processes may write different rows in any order.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the tensor if the tensor does not exist, if `rows` is not whole rows or
    /// exceeds the tensor, or if the write fails, for example on a full disk.
    pub fn write_rows(&self, file: &File, name: &str, first_row: usize, rows: &[f32]) -> Result<(), FileError> {
        let at = self.rows_at(name, first_row, rows.len())?;
        file.write_all_at(bytemuck::cast_slice(rows), at)
            .map_err(|e| FileError::system(format!("write tensor {name} to {}", self.label.display()), e))
    }

    /// Reads all of tensor `name`, row-major.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the tensor if the tensor does not exist or the read fails.
    pub fn read(&self, file: &File, name: &str) -> Result<Vec<f32>, FileError> {
        let (shape, at) = self.location(name)?;
        let mut out = vec![0f32; shape.iter().product()];
        file.read_exact_at(bytemuck::cast_slice_mut(&mut out), *at)
            .map_err(|e| FileError::system(format!("read tensor {name} of {}", self.label.display()), e))?;
        Ok(out)
    }

    /// Reads elements `elements` of tensor `name`.
    ///
    /// # Errors
    ///
    /// Those of [`ResultLayout::read`], and an error if the range exceeds the tensor.
    pub fn read_elements(&self, file: &File, name: &str, elements: Range<usize>) -> Result<Vec<f32>, FileError> {
        let at = self.elements_at(name, elements.clone())?;
        let mut out = vec![0f32; elements.len()];
        file.read_exact_at(bytemuck::cast_slice_mut(&mut out), at)
            .map_err(|e| FileError::system(format!("read tensor {name} of {}", self.label.display()), e))?;
        Ok(out)
    }

    /// Offset in the file of elements `elements` of tensor `name`, in row-major order, bytes.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the tensor if the tensor does not exist or the range exceeds it.
    pub fn elements_at(&self, name: &str, elements: Range<usize>) -> Result<u64, FileError> {
        let (shape, at) = self.location(name)?;
        if elements.start > elements.end || elements.end > shape.iter().product() {
            let what = format!("tensor {name} has shape {shape:?}, no elements {elements:?}");
            return Err(FileError::part(&self.label, what));
        }
        Ok(at + elements.start as u64 * 4)
    }

    fn location(&self, name: &str) -> Result<&(Vec<usize>, u64), FileError> {
        self.tensors.get(name).ok_or_else(|| FileError::no_tensor(&self.label, name))
    }

    /// Offset in the file of `len` numbers from row `first_row` of tensor `name` on, bytes.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the tensor if the tensor does not exist, or if the numbers are not
    /// whole rows or exceed it.
    pub fn rows_at(&self, name: &str, first_row: usize, len: usize) -> Result<u64, FileError> {
        let (shape, at) = self.location(name)?;
        let row: usize = shape.iter().skip(1).product();
        let total: usize = shape.iter().product();
        let first = first_row.checked_mul(row).filter(|&first| first <= total && len <= total - first);
        match first {
            Some(first) if len.is_multiple_of(row.max(1)) => Ok(at + first as u64 * 4),
            _ => {
                let what = format!("tensor {name} has shape {shape:?}, no room for {len} numbers at row {first_row}");
                Err(FileError::part(&self.label, what))
            }
        }
    }
}

/// A result file before publication. The name appears only in [`OutputFile::publish`]; if the file is dropped before, no
/// file is left behind. The exception is a process that is killed while the file has a temporary name, `.aristos-*.tmp` in
/// the target's folder: on file systems without `O_TMPFILE` that is the whole time, on others a moment during
/// publication if it replaces a file or is one of several.
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    /// `None` in memory.
    target: Option<Target>,
}

#[derive(Debug)]
struct Target {
    path: PathBuf,
    dir: PathBuf,
    /// The file's name before publication, on file systems that require one.
    temporary: Option<PathBuf>,
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // Best effort: the file may be gone already.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

impl OutputFile {
    /// Prepares to write `path`: checks that it is writable, reserves space, and writes the header. An existing file at
    /// `path` is unchanged until [`OutputFile::publish`] replaces it.
    ///
    /// # Errors
    ///
    /// Returns an error that names the path if its folder is missing or not writable, if `path` is not a regular file
    /// or not writable, or if the disk is full (with the bytes needed).
    pub fn create(path: &Path, layout: &ResultLayout) -> Result<Self, FileError> {
        let output = Self::create_empty(path)?;
        if let Some(target) = &output.target {
            reserve(&output.file, target, layout.len_bytes)?;
        }
        layout.write_header(&output.file)?;
        Ok(output)
    }

    /// Like [`OutputFile::create`], without contents or reserved space, for a file whose size is not known in advance.
    ///
    /// # Errors
    ///
    /// Those of [`OutputFile::create`].
    pub fn create_empty(path: &Path) -> Result<Self, FileError> {
        let refuse = |reason: &dyn Display| FileError::write(path, reason);
        let path = match path.metadata() {
            Ok(meta) => {
                if !meta.is_file() {
                    let reason = format!("it is {}, expected a regular file or a new name", kind(&meta));
                    return Err(refuse(&reason));
                }
                rustix::fs::access(path, Access::WRITE_OK).map_err(|e| cannot_write(path, e))?;
                // A symbolic link is kept; the file it points to is replaced.
                path.canonicalize().map_err(|e| refuse(&e))?
            }
            Err(e) if e.kind() == ErrorKind::NotFound => path.to_owned(),
            Err(e) => return Err(refuse(&e)),
        };
        if path.file_name().is_none() {
            return Err(refuse(&"expected the name of a file"));
        }
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
            _ => PathBuf::from("."),
        };
        let mode = Mode::from_raw_mode(0o666);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let mut target = Target { path, dir, temporary: None };
        let file = match rustix::fs::openat(CWD, &target.dir, flags | OFlags::TMPFILE, mode) {
            Ok(fd) => File::from(fd),
            // Errors of file systems without O_TMPFILE, and of kernels without it.
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => target.open_named(flags, mode)?,
            Err(e) => return Err(refuse(&format!("folder {}: {}", target.dir.display(), io::Error::from(e)))),
        };
        Ok(OutputFile { file, target: Some(target) })
    }

    /// Like [`OutputFile::create`], in memory, for a run without an output file.
    ///
    /// # Errors
    ///
    /// Returns the system's error.
    pub fn in_memory(layout: &ResultLayout) -> Result<Self, FileError> {
        let file = memory_file("aristos-result", layout.len_bytes)?;
        layout.write_header(&file)?;
        Ok(OutputFile { file, target: None })
    }

    /// Replaces the file at `path` by `content`, atomically.
    ///
    /// # Errors
    ///
    /// Those of [`OutputFile::create`], and an error if the write fails, for example on a full disk.
    pub fn replace(path: &Path, content: &[u8]) -> Result<(), FileError> {
        Self::create_empty(path)?.publish_with(content)
    }

    /// Writes `content`, and publishes the file.
    ///
    /// # Errors
    ///
    /// Those of [`OutputFile::publish`].
    pub fn publish_with(self, content: &[u8]) -> Result<(), FileError> {
        self.with_content(content)?.publish()
    }

    /// Writes `content`, for a later publication.
    ///
    /// # Errors
    ///
    /// Returns an error that names the path if the write fails, for example on a full disk.
    pub fn with_content(mut self, content: &[u8]) -> Result<Self, FileError> {
        let path = self.target.as_ref().map_or(Path::new("memory"), |target| &target.path);
        self.file.write_all(content).map_err(|error| FileError::write(path, error))?;
        Ok(self)
    }

    /// The open file, whose descriptor may be passed to other processes. It closes on exec.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the file its name, atomically, after its data has reached the disk. Does nothing for a file in memory.
    ///
    /// # Errors
    ///
    /// Returns an error that names the path and the system's error; an existing file at the path is then unchanged.
    pub fn publish(self) -> Result<(), FileError> {
        let Some(mut target) = self.target else { return Ok(()) };
        self.file.sync_all().map_err(|e| FileError::write(&target.path, e))?;
        if target.temporary.is_none() {
            let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            let link = |name: &Path| rustix::fs::linkat(CWD, &open, CWD, name, AtFlags::SYMLINK_FOLLOW);
            match link(&target.path) {
                Ok(()) => return target.sync_dir(),
                // linkat cannot replace a file but rename can, so the file gets a temporary name first.
                Err(Errno::EXIST) => target.with_temporary_name(link)?,
                Err(e) => return Err(cannot_write(&target.path, e)),
            }
        }
        target.replace()?;
        target.sync_dir()
    }

    /// Publishes files that belong together. Every file is on disk under a temporary name before the first one is
    /// published, so a full disk leaves all old files. The last file marks the set as complete: its old version is
    /// removed first, and the new one is published last. If the process is killed in between, the last file is missing,
    /// so old and new files cannot be mistaken for one set.
    ///
    /// # Errors
    ///
    /// Those of [`OutputFile::publish`]; if a folder was removed or made read-only meanwhile, the last file may be
    /// missing.
    pub fn publish_all(files: Vec<OutputFile>) -> Result<(), FileError> {
        let mut targets = Vec::with_capacity(files.len());
        for file in files {
            targets.extend(file.named()?);
        }
        // Descriptors keep the old files until all are replaced: freeing their blocks takes milliseconds.
        let hold = |target: &Target| rustix::fs::open(&target.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let old: Vec<_> = targets.iter().map(hold).collect();
        let Some((last, others)) = targets.split_last_mut() else { return Ok(()) };
        if !others.is_empty() {
            match std::fs::remove_file(&last.path) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(FileError::write(&last.path, e)),
                _ => {}
            }
        }
        others.iter_mut().try_for_each(Target::replace)?;
        last.replace()?;
        drop(old);
        targets.iter().try_for_each(Target::sync_dir)
    }

    /// Syncs the file under a temporary name; `None` in memory.
    fn named(self) -> Result<Option<Target>, FileError> {
        let Some(mut target) = self.target else { return Ok(None) };
        self.file.sync_all().map_err(|e| FileError::write(&target.path, e))?;
        if target.temporary.is_none() {
            let open = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            target.with_temporary_name(|name| rustix::fs::linkat(CWD, &open, CWD, name, AtFlags::SYMLINK_FOLLOW))?;
        }
        Ok(Some(target))
    }
}

/// The canonical path of an existing or new file, for comparisons.
pub fn real_path(path: &Path) -> PathBuf {
    let of_new_file = || {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(folder.canonicalize().ok()?.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(of_new_file).unwrap_or_else(|| path.to_owned())
}

impl Target {
    /// Renames the temporary name to the path, atomically.
    fn replace(&mut self) -> Result<(), FileError> {
        if let Some(name) = &self.temporary {
            rustix::fs::rename(name, &self.path).map_err(|e| cannot_write(&self.path, e))?;
            self.temporary = None;
        }
        Ok(())
    }

    /// Calls `make` with unused names in the target's folder until it creates a file. Dropping `self` removes the file.
    fn with_temporary_name<R>(&mut self, make: impl Fn(&Path) -> Result<R, Errno>) -> Result<R, FileError> {
        const TRIES: usize = 100;
        let mut result = Err(Errno::EXIST);
        for _ in 0..TRIES {
            // A random name, because one derived from the target's name could exceed the length limit.
            let name = self.dir.join(format!(".aristos-{:016x}.tmp", rand::random::<u64>()));
            result = make(&name);
            if result.is_ok() {
                self.temporary = Some(name);
            }
            if !matches!(result, Err(Errno::EXIST)) {
                break;
            }
        }
        result.map_err(|e| cannot_write(&self.path, e))
    }

    /// Creates a file under a temporary name.
    fn open_named(&mut self, flags: OFlags, mode: Mode) -> Result<File, FileError> {
        self.with_temporary_name(|name| rustix::fs::openat(CWD, name, flags | OFlags::CREATE | OFlags::EXCL, mode))
            .map(File::from)
    }

    /// Syncs the folder, so that the new name survives a crash.
    fn sync_dir(&self) -> Result<(), FileError> {
        File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(|e| FileError::write(&self.path, format!("folder {}: {e}", self.dir.display())))
    }
}

/// Reserves `len` bytes for `file`, so that a full disk is detected before the work.
fn reserve(file: &File, target: &Target, len: u64) -> Result<(), FileError> {
    let refuse = |reason: String| Err(FileError::write(&target.path, reason));
    // Writing beyond this limit would raise SIGXFSZ.
    if let Some(limit) = rustix::process::getrlimit(rustix::process::Resource::Fsize).current
        && len > limit
    {
        return refuse(format!("it needs {len} bytes, the file size limit (ulimit -f) is {limit}"));
    }
    // Some file systems allocate all free space before they fail. Those without blocks, such as ramfs, report 0.
    if let Some(disk) = rustix::fs::fstatvfs(file).ok().filter(|disk| disk.f_blocks > 0) {
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if len > free {
            return refuse(format!("it needs {len} bytes, the disk has {free} free"));
        }
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        // The file system cannot reserve space; a full disk is detected when the PEs write.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            rustix::fs::ftruncate(file, len).map_err(|e| cannot_write(&target.path, e))
        }
        Err(Errno::NOSPC) => refuse(format!("it needs {len} bytes, the disk has no room for them")),
        Err(e) => Err(cannot_write(&target.path, e)),
    }
}

fn cannot_write(path: &Path, e: Errno) -> FileError {
    FileError::write(path, io::Error::from(e))
}

fn kind(meta: &std::fs::Metadata) -> &'static str {
    let t = meta.file_type();
    if t.is_dir() {
        "a folder"
    } else if t.is_fifo() {
        "a pipe"
    } else if t.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// An anonymous file of `len_bytes` zeros in memory; it closes on exec.
///
/// # Errors
///
/// Returns the system's error.
pub fn memory_file(name: &str, len_bytes: u64) -> Result<File, FileError> {
    rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)
        .and_then(|fd| rustix::fs::ftruncate(&fd, len_bytes).map(|()| File::from(fd)))
        .map_err(|e| FileError::system(format!("hold {name} in memory"), io::Error::from(e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output file on a file system without `O_TMPFILE`.
    fn named(dir: &Path) -> OutputFile {
        let mut target = Target { path: dir.join("out"), dir: dir.to_owned(), temporary: None };
        let file = target.open_named(OFlags::RDWR | OFlags::CLOEXEC, Mode::from_raw_mode(0o666)).unwrap();
        reserve(&file, &target, 64).unwrap();
        OutputFile { file, target: Some(target) }
    }

    #[test]
    fn existing_temporary_file_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut target = Target { path: dir.path().join("out"), dir: dir.path().to_owned(), temporary: None };
        let tried = std::cell::RefCell::new(Vec::new());
        let make = |name: &Path| {
            tried.borrow_mut().push(name.to_owned());
            if tried.borrow().len() < 3 { Err(Errno::EXIST) } else { Ok(()) }
        };
        target.with_temporary_name(make).unwrap();
        let mut names = tried.into_inner();
        assert_eq!(target.temporary.as_ref(), names.last());
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 3);
        let mut target = Target { temporary: None, path: target.path.clone(), dir: target.dir.clone() };
        let error = target.with_temporary_name(|_| Err::<(), _>(Errno::EXIST)).unwrap_err();
        assert!(error.to_string().contains("exists") && target.temporary.is_none(), "{error}");
    }

    #[test]
    fn two_named_temporaries_in_one_folder_do_not_collide() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (named(dir.path()), named(dir.path()));
        first.publish().unwrap();
        second.publish().unwrap();
        assert_eq!(dir.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn named_temporary_is_removed_or_published() {
        let dir = tempfile::tempdir().unwrap();
        let names = || std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
        let out = named(dir.path());
        assert_eq!(names().len(), 1);
        drop(out);
        assert!(names().is_empty());
        std::fs::write(dir.path().join("out"), "old").unwrap();
        named(dir.path()).publish().unwrap();
        assert_eq!(names(), ["out"]);
        assert_eq!(dir.path().join("out").metadata().unwrap().len(), 64);
    }
}
