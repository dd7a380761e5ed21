//! etcd: one plain member, or three with TLS; Debian's version, or that of Kubernetes.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::error::io;
use crate::guard::Guard;
use crate::programs::{self, Program};
use crate::{Authority, Error, Identity, Server, ports};

/// An etcd cluster. Its members end when it is dropped.
pub struct Etcd {
    members: Vec<Server>,
    ports: Vec<u16>,
    tls: Option<Tls>,
    etcdctl: Option<PathBuf>,
    guard: Arc<Guard>,
}

/// What an [`Etcd`] consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EtcdOptions {
    /// The version.
    pub version: EtcdVersion,
    /// The number of members.
    pub members: usize,
    /// Whether clients and peers use TLS, and need certificates of [`Etcd::authority`].
    pub tls: bool,
}

/// A version of etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EtcdVersion {
    /// Debian's package: 3.4, the oldest that Calico supports.
    Debian,
    /// That of the Kubernetes binary: 3.6. An API server with Debian's refuses streamed lists, and may answer a watch
    /// without a version with a timeout.
    Kubernetes,
}

struct Tls {
    authority: Authority,
    /// The client's certificate that [`Etcd::etcdctl`] uses. etcd's name for its administrator is `root`.
    root: Identity,
}

/// The ports of one member.
struct MemberPorts {
    client: u16,
    peer: u16,
    /// Answers `/health` without TLS.
    metrics: u16,
}

impl Etcd {
    /// Starts one member of Debian's version without TLS, and waits until it is healthy.
    ///
    /// # Errors
    ///
    /// etcd is missing or does not start.
    pub fn start() -> Result<Self, Error> {
        Self::start_with(&EtcdOptions { version: EtcdVersion::Debian, members: 1, tls: false })
    }

    /// Starts three members of Debian's version with TLS, and waits until they are healthy.
    ///
    /// # Errors
    ///
    /// etcd is missing or does not start.
    pub fn start_three_with_tls() -> Result<Self, Error> {
        Self::start_with(&EtcdOptions { version: EtcdVersion::Debian, members: 3, tls: true })
    }

    /// Starts these members, and waits until they are healthy.
    ///
    /// # Errors
    ///
    /// etcd is missing or does not start.
    pub fn start_with(options: &EtcdOptions) -> Result<Self, Error> {
        Self::start_in(Arc::new(Guard::new("tortie-etcd-")?), options)
    }

    pub(crate) fn start_in(guard: Arc<Guard>, options: &EtcdOptions) -> Result<Self, Error> {
        let program = options.version.command()?;
        let folder = guard.folder().to_owned();
        let (mut tls, mut server) = (None, None);
        if options.tls {
            let authority = Authority::new(&folder)?;
            server = Some((authority.certificate(), authority.server("etcd")?));
            let root = authority.client("root", &[])?;
            tls = Some(Tls { authority, root });
        }
        let ports = (0..options.members).map(|_| MemberPorts::new()).collect::<Result<Vec<_>, _>>()?;
        let scheme = if options.tls { "https" } else { "http" };
        let cluster = ports.iter().enumerate();
        let cluster: Vec<String> = cluster
            .map(|(index, ports)| format!("etcd-{index}={scheme}://127.0.0.1:{}", ports.peer))
            .collect();
        let mut members = Vec::new();
        for (index, ports) in ports.iter().enumerate() {
            let name = format!("etcd-{index}");
            let mut command = program.clone();
            command.extend(flags(&name, scheme, ports, &cluster.join(","), &folder));
            if let Some((authority, server)) = &server {
                command.extend(tls_flags(authority, server));
            }
            let metrics = ports.metrics;
            members.push(Server::spawn(&guard, &name, command, move || is_healthy(metrics))?);
        }
        for member in &members {
            member.wait_until_ready()?;
        }
        let ports = ports.iter().map(|ports| ports.client).collect();
        Ok(Self { members, ports, tls, etcdctl: Program::Etcdctl.find().ok(), guard })
    }

    /// The members.
    #[must_use]
    pub fn members(&self) -> &[Server] {
        &self.members
    }

    /// The folder with the data of a member, by its number.
    #[must_use]
    pub fn data_folder(&self, member: usize) -> PathBuf {
        data_folder(self.guard.folder(), &format!("etcd-{member}"))
    }

    /// The addresses for clients, one for each member.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.ports.iter().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, *port))).collect()
    }

    /// The URLs for clients, one for each member.
    #[must_use]
    pub fn endpoints(&self) -> Vec<String> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        self.addresses().iter().map(|address| format!("{scheme}://{address}")).collect()
    }

    /// The authority that issues clients' certificates, with TLS.
    #[must_use]
    pub fn authority(&self) -> Option<&Authority> {
        self.tls.as_ref().map(|tls| &tls.authority)
    }

    /// Drops the history before the current revision, and returns that revision. A watch from an earlier one fails.
    ///
    /// # Errors
    ///
    /// etcdctl is missing, or the command fails.
    pub fn compact(&self) -> Result<u64, Error> {
        let fields = self.etcdctl(&["get", "any", "--write-out=fields"])?;
        let revision = fields.lines().find_map(|line| line.strip_prefix("\"Revision\" : ")?.parse().ok());
        let revision: u64 = revision.ok_or_else(|| Error::Command {
            command: "etcdctl get any --write-out=fields".to_owned(),
            output: fields.clone(),
        })?;
        self.etcdctl(&["compact", &revision.to_string()])?;
        Ok(revision)
    }

    /// Runs etcdctl with these arguments on all members, as `root` with TLS, and returns its output.
    ///
    /// # Errors
    ///
    /// etcdctl is missing, or the command fails.
    pub fn etcdctl(&self, arguments: &[&str]) -> Result<String, Error> {
        let mut command = self.etcdctl_without_certificate()?;
        if let Some(Tls { root, .. }) = &self.tls {
            command.arg("--cert").arg(&root.certificate).arg("--key").arg(&root.key);
        }
        command.args(arguments);
        programs::run(command)
    }

    /// The command etcdctl with all endpoints and the authority, for a client of the caller's choice.
    ///
    /// # Errors
    ///
    /// etcdctl is missing.
    pub fn etcdctl_without_certificate(&self) -> Result<Command, Error> {
        let program = self.etcdctl.clone().map_or_else(|| Program::Etcdctl.find(), Ok)?;
        let mut command = Command::new(program);
        command.env_clear().env("ETCDCTL_API", "3");
        command.arg("--endpoints").arg(self.endpoints().join(","));
        if let Some(Tls { authority, .. }) = &self.tls {
            command.arg("--cacert").arg(authority.certificate());
        }
        Ok(command)
    }
}

impl EtcdVersion {
    /// The program with the flags that only this version has.
    fn command(self) -> Result<Vec<String>, Error> {
        match self {
            Self::Debian => Ok(vec![Program::Etcd.find()?.display().to_string()]),
            Self::Kubernetes => {
                let binary = Program::Kube.find()?.display().to_string();
                // The data outlive the process, which is all that tests end; a crash of the machine is not tested.
                Ok([&binary, "etcd", "--unsafe-no-fsync"].map(str::to_owned).to_vec())
            }
        }
    }
}

impl MemberPorts {
    fn new() -> Result<Self, Error> {
        Ok(Self { client: ports::free_port()?, peer: ports::free_port()?, metrics: ports::free_port()? })
    }
}

pub(crate) fn data_folder(folder: &Path, member: &str) -> PathBuf {
    folder.join(format!("{member}.data"))
}

fn flags(name: &str, scheme: &str, ports: &MemberPorts, cluster: &str, folder: &Path) -> Vec<String> {
    let url = |port: u16| format!("{scheme}://127.0.0.1:{port}");
    let data = data_folder(folder, name);
    vec![
        format!("--name={name}"),
        format!("--data-dir={}", data.display()),
        format!("--listen-client-urls={}", url(ports.client)),
        format!("--advertise-client-urls={}", url(ports.client)),
        format!("--listen-peer-urls={}", url(ports.peer)),
        format!("--initial-advertise-peer-urls={}", url(ports.peer)),
        format!("--initial-cluster={cluster}"),
        format!("--listen-metrics-urls=http://127.0.0.1:{}", ports.metrics),
        // The tests share two cores with the compiler; a late heartbeat must not cost the leader its place.
        "--heartbeat-interval=200".to_owned(),
        "--election-timeout=2000".to_owned(),
        "--logger=zap".to_owned(),
        "--log-level=warn".to_owned(),
    ]
}

fn tls_flags(authority: &Path, server: &Identity) -> Vec<String> {
    let mut flags = Vec::new();
    for role in ["", "peer-"] {
        flags.push(format!("--{role}trusted-ca-file={}", authority.display()));
        flags.push(format!("--{role}cert-file={}", server.certificate.display()));
        flags.push(format!("--{role}key-file={}", server.key.display()));
        flags.push(format!("--{role}client-cert-auth"));
    }
    flags
}

/// Whether the member says that it has a leader.
fn is_healthy(port: u16) -> bool {
    let timeout = Duration::from_secs(2);
    let answer = || {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    answer()
        .map_err(|error: std::io::Error| io("asking etcd for its health")(error))
        .is_ok_and(|answer| answer.contains(" 200 ") && answer.contains("\"health\":\"true\""))
}
