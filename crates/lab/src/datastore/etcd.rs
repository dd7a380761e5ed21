//! etcd as the datastore of a lab.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::Instant;
use tortie_api::Kind;
use tortie_store::Store;
use tortie_store::etcd::{Etcd, EtcdConfig};

use crate::dir::write_private;
use crate::pki::Authority;
use crate::process::Process;
use crate::{LabDir, LabError, underlay};

/// How long etcd may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The ports of etcd for clients and peers.
const PORTS: (u16, u16) = (2379, 2380);

/// The address of etcd for agents.
pub(crate) fn url() -> String {
    format!("https://{}:{}", underlay::LAB, PORTS.0)
}

/// Starts etcd, and waits until it answers.
pub(super) async fn start(dir: &LabDir, authority: &Authority) -> Result<(Etcd, Process), LabError> {
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
    let tls = Some(authority.issue("tortie-lab")?.into());
    let etcd = Etcd::new(EtcdConfig { endpoints: vec![url()], tls, login: None })?;
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
    let peers = format!("http://{}:{}", underlay::LAB, PORTS.1);
    let mut command = Command::new("etcd");
    let mut option = |name: &str, value: String| {
        command.arg(format!("--{name}={value}"));
    };
    let path = |name: &str| folder.join(name).display().to_string();
    option("name", "lab".to_owned());
    option("data-dir", path("data"));
    option("listen-client-urls", url());
    option("advertise-client-urls", url());
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
