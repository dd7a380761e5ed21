//! The file with the state of the node for the next start ([`SavedState`]).
//!
//! It is one line with the version of the format, the node, the start of the machine and the checksum of the rest, and then the
//! state as JSON. It is written before policy changes, so that no pod is open in it for longer than the agent knows. It is not
//! flushed to the disk: only a start of the machine needs that, and the sandboxes of pods end with it.

mod writer;

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tortie_dataplane::SavedState;

pub(crate) use self::writer::Saver;
use crate::boot_id::boot_id;

/// The version of the format. A file of another version has no pods.
const VERSION: u32 = 1;
/// The maximum size of the file in bytes: a node with thousands of peers needs less than one percent of it.
const MAX_BYTES: usize = 64 << 20;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Header {
    version: u32,
    node: String,
    /// The start of the machine, as in the report.
    boot_id: String,
    /// The SHA-256 of the rest, in hexadecimal digits.
    sha256: String,
}

/// What an earlier agent has saved.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) state: SavedState,
    /// Whether its pods are of this start of the machine, and complete.
    pub(crate) has_pods: bool,
}

/// Reads the state that an earlier agent of the node has saved; `None` if none has. A file that cannot be read, and one of an
/// earlier start of the machine, have no pods: the interfaces of all pods are closed.
pub(crate) fn read(path: &Path, node: &str) -> Option<Saved> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        read => read.map_err(|error| error.to_string()),
    };
    let saved = bytes.and_then(|bytes| decode(&bytes, node, &boot_id()));
    Some(saved.unwrap_or_else(|problem| {
        tracing::error!(file = %path.display(), problem, "the saved state of the node cannot be read: it is unknown which pods have policy");
        Saved { state: SavedState::unknown(), has_pods: false }
    }))
}

pub(crate) fn decode(bytes: &[u8], node: &str, boot_id: &str) -> Result<Saved, String> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("it has no first line")?;
    let (header, rest) = (&bytes[..end], &bytes[end + 1..]);
    let header: Header =
        serde_json::from_slice(header).map_err(|error| format!("its first line: {error}"))?;
    if header.version != VERSION {
        return Err(format!("it has version {}, and this agent reads {VERSION}", header.version));
    }
    if header.node != node {
        return Err(format!("it is that of node {}", header.node));
    }
    if header.sha256 != checksum(rest) {
        return Err("its content has another checksum than its first line says".to_owned());
    }
    let state: SavedState = serde_json::from_slice(rest).map_err(|error| error.to_string())?;
    // The interfaces of another start are those of other sandboxes, or of other pods.
    let has_pods = !boot_id.is_empty() && header.boot_id == boot_id;
    Ok(Saved { state: if has_pods { state } else { state.without_pods() }, has_pods })
}

pub(crate) fn encode(state: &SavedState, node: &str, boot_id: &str) -> Result<Vec<u8>, String> {
    let rest = serde_json::to_vec(state).map_err(|error| error.to_string())?;
    if rest.len() > MAX_BYTES {
        return Err(format!("it would have {} bytes, and may have {MAX_BYTES}", rest.len()));
    }
    with_header(rest, node, boot_id)
}

/// A state behind its first line.
pub(crate) fn with_header(rest: Vec<u8>, node: &str, boot_id: &str) -> Result<Vec<u8>, String> {
    let (node, boot_id) = (node.to_owned(), boot_id.to_owned());
    let header = Header { version: VERSION, node, boot_id, sha256: checksum(&rest) };
    let header = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
    Ok([header, b"\n".to_vec(), rest].concat())
}

fn checksum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
