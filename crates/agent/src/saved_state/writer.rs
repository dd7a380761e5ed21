//! Writes the file, in a thread of its own: a disk that hangs must not keep policy from changing.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use tortie_dataplane::{NodeState, SavedState};

use super::encode;
use crate::boot_id::boot_id;

/// How long a change of policy waits for the file.
const PATIENCE: Duration = Duration::from_secs(1);

/// Keeps the file as it should be. Its thread ends with it.
#[derive(Debug)]
pub(crate) struct Saver {
    path: PathBuf,
    node: String,
    /// The content of the file, if it is known.
    written: Option<SavedState>,
    /// A state that the thread is writing.
    pending: Option<SavedState>,
    /// Why the file is not as it should be.
    problem: Option<String>,
    states: Sender<SavedState>,
    results: Receiver<Result<(), String>>,
}

impl Saver {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses it.
    pub(crate) fn start(path: PathBuf, node: &str) -> io::Result<Self> {
        let (states, waiting) = mpsc::channel();
        let (done, results) = mpsc::channel();
        let (to, of) = (path.clone(), node.to_owned());
        let write = move || {
            for state in waiting {
                if done.send(write_or_close(&to, &of, &state)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("saved-state".to_owned()).spawn(write)?;
        Ok(Self { path, node: node.to_owned(), written: None, pending: None, problem: None, states, results })
    }

    /// Writes the state, if it differs from what was written last. Waits for the disk, but not for long.
    pub(crate) fn save(&mut self, state: &NodeState) {
        let state = SavedState::of(state);
        if self.pending.is_some() {
            self.receive(Duration::ZERO);
        }
        if self.pending.is_none() && self.written.as_ref() != Some(&state) {
            self.pending = Some(state.clone());
            // The thread ends with this.
            let _ = self.states.send(state);
            self.receive(PATIENCE);
        }
    }

    fn receive(&mut self, patience: Duration) {
        let result = match self.results.recv_timeout(patience) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                self.written = None;
                let path = self.path.display();
                self.problem = Some(format!(
                    "{path}: the disk does not answer; Tortie retries, and until then, an agent that finds no policy on the node \
                     uses an older state"
                ));
                return;
            }
            Err(RecvTimeoutError::Disconnected) => Err("the thread that writes it has failed".to_owned()),
        };
        let state = self.pending.take();
        self.written = state.filter(|_| result.is_ok());
        self.problem = result.err().map(|problem| format!("node {}: {problem}", self.node));
    }

    /// Why the file is not as it should be.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

/// Writes the state. If that fails, the old one must not stay, because it may leave a pod open to which a policy applies now: a
/// state without pods needs less room, and an empty file none.
fn write_or_close(path: &Path, node: &str, state: &SavedState) -> Result<(), String> {
    let encoded = |state: &SavedState| encode(state, node, &boot_id());
    let Err(problem) = encoded(state).and_then(|bytes| replace(path, &bytes)) else { return Ok(()) };
    let without_pods = encoded(&state.clone().without_pods());
    let closed = without_pods.is_ok_and(|bytes| fs::write(path, bytes).is_ok()) || File::create(path).is_ok();
    let until_then = match closed {
        true => "knows none of its pods",
        false => "uses an older state",
    };
    Err(format!(
        "{}: {problem}; Tortie retries, and until then, an agent that finds no policy on the node {until_then}",
        path.display()
    ))
}

/// Replaces the file in one step.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let unfinished = path.with_added_extension("unfinished");
    let write = || {
        if let Some(folder) = path.parent() {
            tortie_cni::local::make_folder(folder)?;
        }
        File::create(&unfinished)?.write_all(bytes)?;
        fs::rename(&unfinished, path)
    };
    write().map_err(|error: io::Error| {
        // It may be what fills the disk.
        let _ = fs::remove_file(&unfinished);
        error.to_string()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tortie_dataplane::{Endpoint, EndpointId};

    use super::super::{decode, read};
    use super::*;

    const NODE: &str = "node";

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
        Some(read(path, NODE)?.state.pods().0)
    }

    #[test]
    fn a_file_that_is_not_as_it_was_written_has_no_pods() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/saved-state.json");
        assert_eq!(number_of_pods(&path), None, "no agent has saved a state");
        let mut saver = Saver::start(path.clone(), NODE).unwrap();
        saver.save(&state(3));
        assert_eq!((number_of_pods(&path), saver.problem()), (Some(3), None));
        let whole = fs::read(&path).unwrap();
        let boot_id = boot_id();
        let pods = |bytes: &[u8], node, boot_id| decode(bytes, node, boot_id).map(|it| it.state.pods().0);
        assert_eq!(pods(&whole, NODE, "another start of the machine"), Ok(0));
        assert!(pods(&whole, "another", &boot_id).is_err());
        for length in 0..whole.len() {
            assert!(pods(&whole[..length], NODE, &boot_id).is_err(), "cut off at {length}");
        }
        for index in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[index] ^= 1;
            // Another start in the first line is no damage of the rest.
            let pods = pods(&damaged, NODE, &boot_id);
            assert!(pods.is_err() || pods == Ok(0), "{index}: {pods:?}");
        }
        let newer = String::from_utf8(whole).unwrap().replacen("\"version\":1", "\"version\":2", 1);
        fs::write(&path, newer).unwrap();
        assert_eq!(number_of_pods(&path), Some(0));
    }

    /// Without an id of the machine's start, no state is known to be of this one.
    #[test]
    fn a_state_without_a_start_of_the_machine_has_no_pods() {
        let bytes = encode(&SavedState::of(&state(3)), NODE, "").unwrap();
        assert!(!decode(&bytes, NODE, "").unwrap().has_pods);
    }

    /// A folder in the place of the unfinished file: nobody can write it, as on a full disk.
    #[test]
    fn a_state_that_cannot_be_written_has_no_pods_and_is_retried() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("saved-state.json");
        let mut saver = Saver::start(path.clone(), NODE).unwrap();
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

    /// A pipe that nobody reads, in the place of the unfinished file, is a disk that does not answer.
    #[test]
    fn a_disk_that_hangs_delays_policy_only_for_a_moment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("saved-state.json");
        let unfinished = path.with_added_extension("unfinished");
        let made = std::process::Command::new("mkfifo").arg(&unfinished).status().unwrap();
        assert!(made.success());
        let mut saver = Saver::start(path.clone(), NODE).unwrap();
        let begun = std::time::Instant::now();
        for pods in 1..4 {
            saver.save(&state(pods));
            assert!(saver.problem().is_some_and(|problem| problem.contains("the disk does not answer")));
        }
        assert!(begun.elapsed() < Duration::from_secs(3), "one change waits");
        // The disk answers. The next try writes the newest state.
        let _reader = fs::read(&unfinished).unwrap();
        while saver.problem().is_some() {
            saver.save(&state(3));
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(number_of_pods(&path), Some(3));
    }
}
