//! A file that is read and never changed: what redb writes stays in memory. Opening a database repairs it, and its check of
//! the pages may go back to an earlier state, which nobody must serve unnoticed.

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

/// The size of the parts of a file that are kept in memory when something is written to them.
const BLOCK: u64 = 4_096;

/// A file, and what would have been written to it.
#[derive(Debug)]
pub(super) struct Overlay {
    file: FileBackend,
    written: Mutex<Overlaid>,
}

#[derive(Debug)]
struct Overlaid {
    length: u64,
    /// The part of the file that still counts.
    from_file: u64,
    /// By their numbers.
    blocks: BTreeMap<u64, Vec<u8>>,
}

impl Overlay {
    /// # Errors
    /// The file cannot be read, or another process has it open.
    pub(super) fn new(file: FileBackend) -> io::Result<Self> {
        let length = file.len()?;
        let written = Mutex::new(Overlaid { length, from_file: length, blocks: BTreeMap::new() });
        Ok(Self { file, written })
    }

    fn lock(&self) -> MutexGuard<'_, Overlaid> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The content of a block.
    fn block(&self, written: &Overlaid, number: u64) -> io::Result<Vec<u8>> {
        if let Some(block) = written.blocks.get(&number) {
            return Ok(block.clone());
        }
        let mut block = vec![0; BLOCK as usize];
        let begin = number * BLOCK;
        let of_file = written.from_file.saturating_sub(begin).min(BLOCK);
        if of_file > 0 {
            self.file.read(begin, &mut block[..of_file as usize])?;
        }
        Ok(block)
    }
}

/// The blocks that a range touches: the number of each, its part of the range, and the place in the block.
fn blocks(offset: u64, length: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>, usize)> {
    let end = offset + length as u64;
    (offset / BLOCK..end.div_ceil(BLOCK)).map(move |number| {
        let begin = offset.max(number * BLOCK);
        let until = end.min((number + 1) * BLOCK);
        let part = (begin - offset) as usize..(until - offset) as usize;
        (number, part, (begin - number * BLOCK) as usize)
    })
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().length)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let written = self.lock();
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > written.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for (number, part, place) in blocks(offset, out.len()) {
            let block = self.block(&written, number)?;
            let length = part.len();
            out[part].copy_from_slice(&block[place..place + length]);
        }
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut written = self.lock();
        if length < written.length {
            let last = length / BLOCK;
            written.blocks.retain(|number, _| *number <= last);
            if let Some(block) = written.blocks.get_mut(&last) {
                block[(length % BLOCK) as usize..].fill(0);
            }
            written.from_file = written.from_file.min(length);
        }
        written.length = length;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut written = self.lock();
        for (number, part, place) in blocks(offset, data.len()) {
            let mut block = self.block(&written, number)?;
            block[place..place + part.len()].copy_from_slice(&data[part]);
            written.blocks.insert(number, block);
        }
        written.length = written.length.max(offset + data.len() as u64);
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.file.try_lock_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.file.unlock_range(start, end)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, Vec<u8>),
        Length(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let bytes = proptest::collection::vec(any::<u8>(), 0..9_000);
        let step = prop_oneof![
            3 => (0_u64..20_000, bytes).prop_map(|(offset, bytes)| Step::Write(offset, bytes)),
            1 => (0_u64..30_000).prop_map(Step::Length),
        ];
        proptest::collection::vec(step, 0..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// It reads as a file that is written, and the file stays as it was.
        #[test]
        fn an_overlay_reads_as_a_written_file(content in proptest::collection::vec(any::<u8>(), 1..20_000), steps in steps()) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("f");
            std::fs::write(&path, &content).unwrap();
            let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
            let overlay = Overlay::new(FileBackend::new(file).unwrap()).unwrap();
            let mut expected = content.clone();
            for step in steps {
                match step {
                    Step::Write(offset, bytes) => {
                        let begin = offset as usize;
                        expected.resize(expected.len().max(begin + bytes.len()), 0);
                        expected[begin..begin + bytes.len()].copy_from_slice(&bytes);
                        overlay.write(offset, &bytes).unwrap();
                    }
                    Step::Length(length) => {
                        expected.resize(length as usize, 0);
                        overlay.set_len(length).unwrap();
                    }
                }
                let mut all = vec![0; usize::try_from(overlay.len().unwrap()).unwrap()];
                overlay.read(0, &mut all).unwrap();
                prop_assert!(all == expected);
            }
            prop_assert!(overlay.read(expected.len() as u64, &mut [0]).is_err());
            prop_assert!(std::fs::read(&path).unwrap() == content);
        }
    }
}
