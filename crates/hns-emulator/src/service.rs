//! The emulated HNS as a separate process, because HNS is a service that outlives its clients.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tortie_hcn::{Hcn, serve_unix, spawn_tcp};
use tortie_kernel::namespace::NetNs;
use tracing::info;

use crate::config::Config;
use crate::emulator::Emulator;
use crate::error::Error;
use crate::library::LibraryService;

/// The configuration of the service.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// The emulated HNS and the node's address.
    pub hns: Config,
    /// The Unix socket of the service. A socket without a listener is replaced.
    pub socket: PathBuf,
    /// Where it serves the libraries of programs under Wine, too.
    pub libraries: Option<SocketAddr>,
}

/// Serves an emulated HNS with its switch until the process ends. The node is the network namespace of the calling
/// thread. The objects live as long as the process.
///
/// # Errors
/// The switch cannot start (it needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN in the node's namespaces, and UDP
/// port 4789 of the node), or the socket or the address is in use.
pub fn run_service(config: ServiceConfig) -> Result<(), Error> {
    let emulator = Emulator::with_switch(config.hns.clone(), NetNs::current()?)?;
    let listener = listen(&config.socket).map_err(Error::system("listen at the HNS service's socket"))?;
    info!(socket = %config.socket.display(), version = %config.hns.version, "the emulated HNS is ready");
    let hcn: Arc<dyn Hcn> = Arc::new(emulator);
    if let Some(address) = config.libraries {
        let listening = Error::system("listen for the libraries of programs under Wine");
        let listener = TcpListener::bind(address).map_err(listening)?;
        let libraries = Arc::new(LibraryService::new(hcn.clone()));
        spawn_tcp(listener, libraries)
            .map_err(Error::system("serve the libraries of programs under Wine"))?;
    }
    serve_unix(&listener, &hcn).map_err(Error::system("accept a client"))
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        // A file exists: from a running service or from one that was killed.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && UnixStream::connect(path).is_err() => {
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        result => result,
    }
}
