//! The file with the state of the node for the next start ([`SavedState`]).
//!
//! It is one line with the version of the format, the start of the machine and the checksum of the rest, and then the state
//! as JSON. It is written before policy changes, so that no pod is open in it for longer than the agent knows. It is not
//! flushed to the disk: only a start of the machine needs that, and the sandboxes of pods end with it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tortie_dataplane::{NodeState, SavedState};

use crate::boot_id::boot_id;

/// The version of the format. A file of another version closes all pods.
const VERSION: u32 = 1;
/// The maximum size of the file in bytes: a node with thousands of peers needs less than one percent of it.
const MAX_BYTES: usize = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    version: u32,
    /// The start of the machine, as in the report.
    boot_id: String,
    /// The SHA-256 of the rest, in hexadecimal digits.
    sha256: String,
}

/// Reads the state that an earlier agent has saved; `None` if none has. A file that cannot be read, and one of an earlier start
/// of the machine, have no pods: the interfaces of all pods are closed.
pub(crate) fn read(path: &Path) -> Option<SavedState> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        read => read.map_err(|error| error.to_string()),
    };
    let state = bytes.and_then(|bytes| decode(&bytes, &boot_id()));
    Some(state.unwrap_or_else(|problem| {
        tracing::error!(file = %path.display(), problem, "the saved state cannot be read; if the node has no policy, all pods are closed until the datastore answers");
        SavedState::default()
    }))
}

fn decode(bytes: &[u8], boot_id: &str) -> Result<SavedState, String> {
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("it has no first line")?;
    let (header, rest) = (&bytes[..end], &bytes[end + 1..]);
    let header: Header =
        serde_json::from_slice(header).map_err(|error| format!("its first line: {error}"))?;
    if header.version != VERSION {
        return Err(format!("it has version {}, and this agent reads {VERSION}", header.version));
    }
    if header.sha256 != checksum(rest) {
        return Err("its content has another checksum than its first line says".to_owned());
    }
    let state: SavedState = serde_json::from_slice(rest).map_err(|error| error.to_string())?;
    // The interfaces are those of other sandboxes, or of other pods.
    Ok(if header.boot_id == boot_id { state } else { state.without_pods() })
}

fn encode(state: &SavedState, boot_id: &str) -> Result<Vec<u8>, String> {
    let rest = serde_json::to_vec(state).map_err(|error| error.to_string())?;
    if rest.len() > MAX_BYTES {
        return Err(format!("it would have {} bytes, and may have {MAX_BYTES}", rest.len()));
    }
    let header = Header { version: VERSION, boot_id: boot_id.to_owned(), sha256: checksum(&rest) };
    let header = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
    Ok([header, b"\n".to_vec(), rest].concat())
}

fn checksum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes the file.
#[derive(Debug)]
pub(crate) struct Saver {
    path: PathBuf,
    /// The content of the file, if it is known.
    written: Option<SavedState>,
    /// Why the file is not as it should be.
    problem: Option<String>,
}

impl Saver {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, written: None, problem: None }
    }

    /// Writes the state, if it differs from what was written last.
    pub(crate) fn save(&mut self, state: &NodeState) {
        let state = SavedState::of(state);
        if self.written.as_ref() == Some(&state) {
            return;
        }
        let written = encode(&state, &boot_id()).and_then(|bytes| self.write(&bytes));
        self.written = written.is_ok().then_some(state);
        self.problem = written.err().map(|problem| {
            // The old state may leave a pod open to which a policy applies now. An empty file closes all pods, and needs no room.
            let closed = match File::create(&self.path) {
                Ok(_) => "until then, an agent that finds no policy on the node closes all its pods",
                Err(_) => "until then, an agent that finds no policy on the node uses an older state",
            };
            format!("{}: {problem}; Tortie retries, and {closed}", self.path.display())
        });
    }

    fn write(&self, bytes: &[u8]) -> Result<(), String> {
        let unfinished = self.path.with_added_extension("unfinished");
        let write = || {
            if let Some(folder) = self.path.parent() {
                tortie_cni::local::make_folder(folder)?;
            }
            File::create(&unfinished)?.write_all(bytes)?;
            fs::rename(&unfinished, &self.path)
        };
        write().map_err(|error: io::Error| {
            // It may be what fills the disk.
            let _ = fs::remove_file(&unfinished);
            error.to_string()
        })
    }

    /// Why the file is not as it should be.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tortie_dataplane::{Endpoint, EndpointId};

    use super::*;

    /// The state of a node with this number of pods.
    fn state(pods: u8) -> NodeState {
        let pod = |number: u8| {
            let id = EndpointId {
                namespace: "n".into(),
                pod: format!("p{number}").into(),
                interface: "eth0".into(),
            };
            let endpoint = Endpoint {
                container_id: "c".into(),
                host_interface: format!("cali{number}").into(),
                addresses: vec![[10, 65, 0, number].into()],
                mac: None,
                host_ports: [].into(),
                program: Arc::default(),
            };
            (id, Arc::new(endpoint))
        };
        NodeState { endpoints: (0..pods).map(pod).collect(), ..NodeState::default() }
    }

    fn number_of_pods(path: &Path) -> Option<usize> {
        Some(read(path)?.pods().0)
    }

    #[test]
    fn a_file_that_is_not_as_it_was_written_has_no_pods() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/saved-state.json");
        assert_eq!(number_of_pods(&path), None, "no agent has saved a state");
        let mut saver = Saver::new(path.clone());
        saver.save(&state(3));
        assert_eq!((number_of_pods(&path), saver.problem()), (Some(3), None));
        let whole = fs::read(&path).unwrap();
        assert_eq!(decode(&whole, "another start of the machine").unwrap().pods(), (0, 0));
        for length in 0..whole.len() {
            assert!(decode(&whole[..length], &boot_id()).is_err(), "cut off at {length}");
        }
        for index in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[index] ^= 1;
            // Another start in the first line is no damage of the rest.
            let pods = decode(&damaged, &boot_id()).map(|state| state.pods());
            assert!(pods.is_err() || pods == Ok((0, 0)), "{index}: {pods:?}");
        }
        let newer = String::from_utf8(whole).unwrap().replacen("\"version\":1", "\"version\":2", 1);
        fs::write(&path, newer).unwrap();
        assert_eq!(number_of_pods(&path), Some(0));
    }

    /// A folder in the place of the unfinished file: nobody can write it, as on a full disk.
    #[test]
    fn a_state_that_cannot_be_written_closes_all_pods_and_is_retried() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("saved-state.json");
        let mut saver = Saver::new(path.clone());
        saver.save(&state(2));
        let in_the_way = path.with_added_extension("unfinished");
        fs::create_dir(&in_the_way).unwrap();
        saver.save(&state(2));
        assert_eq!((number_of_pods(&path), saver.problem()), (Some(2), None), "nothing has changed");
        saver.save(&state(3));
        assert_eq!(number_of_pods(&path), Some(0));
        assert!(saver.problem().is_some_and(|problem| problem.contains("saved-state.json")));
        fs::remove_dir(&in_the_way).unwrap();
        saver.save(&state(3));
        assert_eq!((number_of_pods(&path), saver.problem()), (Some(3), None));
    }
}
