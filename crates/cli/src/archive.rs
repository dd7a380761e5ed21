//! Archives for bug reports: tar files, compressed with gzip.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use tar::{Builder, Header};

/// An archive whose files are in one folder.
pub(crate) struct Archive {
    builder: Builder<GzEncoder<BufWriter<File>>>,
    folder: &'static str,
}

impl Archive {
    /// Creates the file, which must not exist. Only its owner may read it: policies tell an attacker a lot.
    pub(crate) fn create(path: &Path, folder: &'static str) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        let builder = Builder::new(GzEncoder::new(BufWriter::new(file), Compression::default()));
        Ok(Self { builder, folder })
    }

    pub(crate) fn add_json(&mut self, name: &str, value: &Value) -> io::Result<()> {
        self.add(name, &serde_json::to_vec_pretty(value)?)
    }

    pub(crate) fn add(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        self.builder.append_data(&mut header, format!("{}/{name}", self.folder), bytes)
    }

    pub(crate) fn finish(self) -> io::Result<()> {
        let mut compressed = self.builder.into_inner()?;
        compressed.try_finish()?;
        compressed.finish()?.flush()
    }
}
