//! What asks a daemon to end.

use std::io;

/// Waits until the system or its administrator asks this process to end: SIGTERM on Linux.
#[cfg(unix)]
pub(crate) async fn end() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    signal(SignalKind::terminate())?.recv().await;
    Ok(())
}

/// Waits until the system or its administrator asks this process to end: Ctrl-C, Ctrl-Break, the end of the console or
/// container, or the system's shutdown.
#[cfg(windows)]
pub(crate) async fn end() -> io::Result<()> {
    use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};
    let (mut by_c, mut by_break) = (ctrl_c()?, ctrl_break()?);
    let (mut by_close, mut by_shutdown) = (ctrl_close()?, ctrl_shutdown()?);
    tokio::select! {
        _ = by_c.recv() => {}
        _ = by_break.recv() => {}
        _ = by_close.recv() => {}
        _ = by_shutdown.recv() => {}
    }
    Ok(())
}
