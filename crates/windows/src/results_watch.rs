//! Watches the folder with the results of CNI plugins: HNS notifies nobody of new endpoints.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, SystemTime};

/// The interval of looks at the folder.
const INTERVAL: Duration = Duration::from_millis(500);

/// The watch, which ends when this is dropped.
pub(crate) struct ResultsWatch(#[expect(dead_code, reason = "the thread ends with it")] Arc<()>);

impl ResultsWatch {
    /// Calls `note` when files have come, gone or changed. The folder may come later.
    pub(crate) fn start(folder: PathBuf, note: impl Fn() + Send + 'static) -> std::io::Result<ResultsWatch> {
        let alive = Arc::new(());
        let weak = Arc::downgrade(&alive);
        thread::Builder::new()
            .name("results-watch".to_owned())
            .spawn(move || watch(&folder, &note, &weak))?;
        Ok(ResultsWatch(alive))
    }
}

fn watch(folder: &Path, note: &dyn Fn(), alive: &Weak<()>) {
    let mut known = files(folder);
    while alive.strong_count() > 0 {
        let now = files(folder);
        if now != known {
            known = now;
            note();
        }
        thread::sleep(INTERVAL);
    }
}

/// The files with their sizes and times. A folder that does not exist has none.
fn files(folder: &Path) -> BTreeSet<(OsString, u64, Option<SystemTime>)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let described = entries.map(|entry| {
        let metadata = entry.metadata().ok();
        let length = metadata.as_ref().map_or(0, std::fs::Metadata::len);
        (entry.file_name(), length, metadata.and_then(|metadata| metadata.modified().ok()))
    });
    described.collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn files_that_come_change_and_go_are_noticed() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("results");
        let (send, noted) = mpsc::channel();
        let watch = ResultsWatch::start(folder.clone(), move || send.send(()).unwrap_or_default()).unwrap();
        let is_noted = |what: &str| {
            assert!(noted.recv_timeout(Duration::from_secs(10)).is_ok(), "{what}");
            while noted.recv_timeout(2 * INTERVAL).is_ok() {}
        };
        std::fs::create_dir(&folder).unwrap();
        assert!(noted.recv_timeout(3 * INTERVAL).is_err(), "an empty folder has nothing more than none");
        std::fs::write(folder.join("one"), "x").unwrap();
        is_noted("a file");
        std::fs::write(folder.join("one"), "longer").unwrap();
        is_noted("another content");
        std::fs::remove_file(folder.join("one")).unwrap();
        is_noted("the end of a file");
        drop(watch);
        assert!(matches!(
            noted.recv_timeout(Duration::from_secs(10)),
            Err(mpsc::RecvTimeoutError::Disconnected)
        ));
    }
}
