//! Tar archives (POSIX ustar) without times, owners and anything else that differs between machines.

/// The size of a block.
const BLOCK: usize = 512;

/// What an entry is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Entry<'a> {
    File { mode: u32, bytes: &'a [u8] },
    Folder { mode: u32 },
    Link { target: &'a str },
}

/// An archive under construction.
#[derive(Default)]
pub(super) struct Tar {
    bytes: Vec<u8>,
}

impl Tar {
    /// Adds an entry. The name and the target of a link have at most 99 bytes.
    pub(super) fn add(&mut self, name: &str, entry: Entry<'_>) {
        let (kind, mode, content, target): (u8, u32, &[u8], &str) = match entry {
            Entry::File { mode, bytes } => (b'0', mode, bytes, ""),
            Entry::Link { target } => (b'2', 0o777, &[], target),
            Entry::Folder { mode } => (b'5', mode, &[], ""),
        };
        assert!(name.len() < 100 && target.len() < 100, "{name}: the name is too long for a tar archive");
        let mut header = [0_u8; BLOCK];
        let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
        put(0, name.as_bytes());
        put(100, format!("{mode:07o}").as_bytes());
        // Owner and group are root.
        put(108, b"0000000");
        put(116, b"0000000");
        put(124, format!("{:011o}", content.len()).as_bytes());
        put(136, b"00000000000");
        // While it is computed, the checksum counts as blanks.
        put(148, b"        ");
        put(156, &[kind]);
        put(157, target.as_bytes());
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().copied().map(u32::from).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend(header);
        self.bytes.extend(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK), 0);
    }

    /// The complete archive: two empty blocks end it.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK, 0);
        self.bytes
    }
}
