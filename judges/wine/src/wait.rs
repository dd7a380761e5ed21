//! Waits for what other programs do in their own time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

const INTERVAL: Duration = Duration::from_millis(50);

/// Waits until it is so. An error ends the wait, such as one about a program that has ended meanwhile.
pub(super) fn until(what: &str, patience: Duration, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + patience;
    while !is_so().with_context(|| what.to_owned())? {
        ensure!(Instant::now() < end, "{what}: not in {} seconds", patience.as_secs());
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}
