//! The log of a service, which has no standard error: a file that is replaced when it is long.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The length at which a new file is begun. The one before stays.
const MAX_LENGTH: u64 = 16 << 20;

/// A file of limited length, beside its predecessor.
pub(crate) struct LogFile {
    path: PathBuf,
    file: File,
    length: u64,
    max: u64,
}

impl LogFile {
    /// Continues a file, or creates it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Self::with_max(path, MAX_LENGTH)
    }

    fn with_max(path: &Path, max: u64) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, length, max })
    }
}

impl Write for LogFile {
    /// Writes all of a message, so that no message is in two files.
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        if self.length > 0 && self.length + message.len() as u64 > self.max {
            match fs::rename(&self.path, self.path.with_added_extension("old")) {
                Ok(()) => *self = Self::with_max(&self.path, self.max)?,
                // Somebody may read the file. It is continued, and renamed when it has grown as much again.
                Err(_) => self.length = 0,
            }
        }
        self.file.write_all(message)?;
        self.length += message.len() as u64;
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_is_replaced_and_its_predecessor_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.log");
        LogFile::open(&path).unwrap().write_all(b"one\n").unwrap();
        for message in ["two\n", "three\n", "four\n", "five\n"] {
            LogFile::with_max(&path, 10).unwrap().write_all(message.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "four\nfive\n");
        assert_eq!(fs::read_to_string(path.with_added_extension("old")).unwrap(), "three\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn no_message_is_lost_when_the_file_cannot_be_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.log");
        // A file cannot replace a folder.
        fs::create_dir(path.with_added_extension("old")).unwrap();
        let mut log = LogFile::with_max(&path, 10).unwrap();
        for message in ["one\n", "two\n", "three\n", "four\n"] {
            log.write_all(message.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\nfour\n");
        fs::remove_dir(path.with_added_extension("old")).unwrap();
        log.write_all(b"five, after which\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "five, after which\n");
    }
}
