//! The datastore of a lab: the embedded one in the lab's own process, or etcd.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tortie_api::Kind;
use tortie_store::etcd::{Etcd, EtcdConfig};
use tortie_store::rpc::Remote;
use tortie_store::{Embedded, Source, Store};

use crate::dir::write_private;
use crate::pki::Authority;
use crate::process::Process;
use crate::{LabDir, LabError, underlay};

/// How long etcd may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The ports of etcd for clients and peers.
const ETCD_PORTS: (u16, u16) = (2379, 2380);

/// A kind of datastore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Datastore {
    /// A file of the lab's own process, served by gRPC.
    #[default]
    Embedded,
    /// etcd, from Debian's package `etcd-server`, with TLS.
    Etcd,
}

impl Datastore {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::Etcd => "etcd",
        }
    }
}

/// The address of etcd for agents.
pub(crate) fn etcd_url() -> String {
    format!("https://{}:{}", underlay::LAB, ETCD_PORTS.0)
}

/// A client for the datastore of a running lab, for a process outside of the lab's network.
#[must_use]
pub fn client(dir: &LabDir) -> Remote {
    let remote = Remote::unix(&dir.store_socket());
    match dir.etcd().exists() {
        true => remote.with_watches_by_kind(),
        false => remote,
    }
}

/// Opens or starts the datastore. The process must be kept.
pub(crate) async fn open(
    datastore: Datastore,
    dir: &LabDir,
    authority: &Authority,
) -> Result<(Arc<dyn Source>, Option<Process>), LabError> {
    match datastore {
        Datastore::Embedded => Ok((Arc::new(Embedded::open(&dir.store_file())?), None)),
        Datastore::Etcd => {
            let (etcd, process) = start_etcd(dir, authority).await?;
            Ok((Arc::new(etcd), Some(process)))
        }
    }
}

async fn start_etcd(dir: &LabDir, authority: &Authority) -> Result<(Etcd, Process), LabError> {
    let folder = dir.etcd();
    fs::create_dir(&folder).map_err(LabError::file("making the folder", &folder))?;
    let server = authority.issue(&underlay::LAB.to_string())?;
    let file = |name: &str| folder.join(name);
    for (name, text) in
        [("ca.pem", &server.authority), ("etcd.pem", &server.certificate), ("etcd.key", &server.key)]
    {
        write_private(&file(name), text)?;
    }
    let log = dir.log("etcd");
    let mut process = Process::start("etcd".to_owned(), command(&folder, &log)?).map_err(|error| {
        LabError::problem("etcd", format!("{error}; install it: apt-get install etcd-server"))
    })?;
    let tls = Some(authority.issue("tortie-lab")?);
    let etcd = Etcd::new(EtcdConfig { endpoints: vec![etcd_url()], tls, login: None })?;
    let deadline = Instant::now() + START_TIMEOUT;
    while let Err(error) = etcd.barrier(&[Kind::Node]).await {
        let text = fs::read_to_string(&log).unwrap_or_default();
        if process.has_ended() {
            return Err(LabError::problem("etcd", format!("ended; its log:\n{text}")));
        }
        if Instant::now() > deadline {
            return Err(LabError::problem("etcd", format!("does not answer: {error}; its log:\n{text}")));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok((etcd, process))
}

fn command(folder: &Path, log: &PathBuf) -> Result<Command, LabError> {
    let output = File::create(log).map_err(LabError::file("making the log", log))?;
    let errors = output.try_clone().map_err(LabError::file("opening the log", log))?;
    let peers = format!("http://{}:{}", underlay::LAB, ETCD_PORTS.1);
    let mut command = Command::new("etcd");
    let mut option = |name: &str, value: String| {
        command.arg(format!("--{name}={value}"));
    };
    let path = |name: &str| folder.join(name).display().to_string();
    option("name", "lab".to_owned());
    option("data-dir", path("data"));
    option("listen-client-urls", etcd_url());
    option("advertise-client-urls", etcd_url());
    option("listen-peer-urls", peers.clone());
    option("initial-advertise-peer-urls", peers.clone());
    option("initial-cluster", format!("lab={peers}"));
    option("trusted-ca-file", path("ca.pem"));
    option("cert-file", path("etcd.pem"));
    option("key-file", path("etcd.key"));
    option("client-cert-auth", "true".to_owned());
    option("logger", "zap".to_owned());
    command.stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0);
    Ok(command)
}
