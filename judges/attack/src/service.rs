//! `tortie store serve` in a network namespace of its own, with certificates of each role.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use tempfile::TempDir;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Change, LinkSetting, RouteSocket};
use tortie_store::rpc::{Remote, TlsFiles};

use crate::process::{self, Process, wait_until};

/// Where it listens, in its namespace.
pub(crate) const ADDRESS: &str = "127.0.0.1:6666";
/// What a service of systemd gets if nobody says otherwise. Whoever runs the attacks may have more.
const DESCRIPTORS: &str = "--nofile=1024:1024";
/// How long it may take to start.
const START: Duration = Duration::from_secs(30);

/// A running service.
#[derive(Debug)]
pub(crate) struct Service {
    process: Process,
    folder: TempDir,
    pub(crate) netns: NetNs,
    program: PathBuf,
}

impl Service {
    /// Starts a service whose objects may have that many MiB, for these clients: `node one`, `controllers`, `operator ann`.
    pub(crate) fn start(program: &Path, quota: u32, clients: &[&str]) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("attack-").tempdir()?;
        let tortie = |line: &str| process::output(&mut tortie(program, folder.path(), line));
        for client in [&["authority", "store"], clients].concat() {
            tortie(&format!("certs {client}"))?;
        }
        tortie("store init --data s.redb")?;
        let netns = NetNs::create()?;
        netns.run(loopback)??;
        let line = format!(
            "store serve --data s.redb --socket s.sock --quota {quota} --listen {ADDRESS} --tls-authority \
             tortie-certs/authority.crt --tls-certificate tortie-certs/store.crt --tls-key tortie-certs/store.key"
        );
        let mut command = Command::new("prlimit");
        command.args([DESCRIPTORS, &program.display().to_string()]).args(line.split(' '));
        command.current_dir(folder.path()).env_remove("TORTIE_STORE");
        let process = Process::start(netns.enter_on_spawn(&mut command)?, &folder.path().join("log"))?;
        let mut service = Self { process, folder, netns, program: program.to_owned() };
        let serves = wait_until(START, || {
            ensure!(!service.process.has_ended(), "the service ends: {}", service.log());
            Ok(service.folder.path().join("s.sock").exists())
        });
        ensure!(serves?, "the service does not start: {}", service.log());
        Ok(service)
    }

    /// Issues a certificate of its authority for clients that names no role, which `tortie certs` does not do.
    pub(crate) fn issue(&self, name: &str, common_name: &str) -> Result<()> {
        let folder = self.folder.path().join("tortie-certs");
        let read = |file: &str| fs::read_to_string(folder.join(file));
        let key = KeyPair::from_pem(&read("authority.key")?)?;
        let issuer = Issuer::from_ca_cert_pem(&read("authority.crt")?, key)?;
        let own = KeyPair::generate()?;
        let mut params = CertificateParams::new([common_name.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        fs::write(folder.join(format!("{name}.crt")), params.signed_by(&own, &issuer)?.pem())?;
        Ok(fs::write(folder.join(format!("{name}.key")), own.serialize_pem())?)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// A new client with the certificate of this name, such as `node-one`, `controllers`, `operator-ann`. It is used in the namespace.
    pub(crate) fn client(&self, name: &str) -> Result<Remote> {
        self.client_of("tortie-certs", name)
    }

    /// The same with a certificate of another folder than the service's.
    pub(crate) fn client_of(&self, folder: &str, name: &str) -> Result<Remote> {
        let file = |name: String| self.folder.path().join(folder).join(name);
        let files = TlsFiles {
            authority: self.folder.path().join("tortie-certs/authority.crt"),
            certificate: file(format!("{name}.crt")),
            key: file(format!("{name}.key")),
        };
        Remote::tls(ADDRESS, files).context("a client")
    }

    /// A client by the socket of operators, which works from everywhere.
    pub(crate) fn operator(&self) -> Remote {
        Remote::unix(&self.folder.path().join("s.sock"))
    }

    /// The most that the process has had, in MiB.
    pub(crate) fn peak_of_memory(&self) -> Result<u64> {
        process::peak_of_memory(self.pid())
    }

    /// How many files and connections it has open.
    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    pub(crate) fn log(&self) -> String {
        process::beginning(&self.folder.path().join("log"))
    }

    /// Runs asynchronous work in its namespace.
    pub(crate) fn run<T: Send>(&self, work: impl AsyncFnOnce() -> Result<T> + Send) -> Result<T> {
        let work = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(work())
        };
        self.netns.run(work)?
    }

    /// Checks that it ends in order, with an undamaged file.
    pub(crate) fn end(mut self) -> Result<()> {
        self.process.end(START)?;
        process::output(&mut tortie(&self.program, self.folder.path(), "store check --data s.redb")).map(drop)
    }
}

fn tortie(program: &Path, folder: &Path, line: &str) -> Command {
    let mut command = Command::new(program);
    command.args(line.split(' ')).current_dir(folder).env_remove("TORTIE_STORE");
    command
}

fn loopback() -> Result<()> {
    let mut socket = RouteSocket::open()?;
    let link = socket.link("lo")?.context("no loopback")?;
    Ok(socket.change(&Change::SetLink(link.index, vec![LinkSetting::Up(true)]))?)
}
