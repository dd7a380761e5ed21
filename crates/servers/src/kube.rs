//! The Kubernetes API on a real etcd, optionally with its controllers and scheduler.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rcgen::KeyPair;
use uuid::Uuid;

use crate::authority::file_name;
use crate::error::write;
use crate::guard::Guard;
use crate::prepared;
use crate::programs::{self, Program};
use crate::server::listens;
use crate::{Authority, Error, Etcd, EtcdOptions, EtcdVersion, Identity, Server, ports};

/// The administrator: a member of `system:masters`, whom RBAC allows everything.
const ADMIN: &str = "admin";

/// The address of the service `kubernetes`: the first of the range of services.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);

/// What a [`KubeApi`] consists of.
#[derive(Debug, Clone, Default)]
pub struct KubeOptions {
    /// Starts the controller manager. Without it, namespaces have no service accounts, and pods do not need one.
    pub controllers: bool,
    /// Starts the scheduler.
    pub scheduler: bool,
    /// Users beside `admin`, each with groups. RBAC allows them nothing at first.
    pub users: Vec<(String, Vec<String>)>,
    /// The address and port of the API server, instead of a free port on 127.0.0.1.
    pub listen: Option<(Ipv4Addr, u16)>,
    /// Serves kubelets, and pods by the service `kubernetes`: the address in `listen` must be one that nodes reach.
    pub nodes: bool,
    /// Gives Services IPv6 addresses on request, too.
    pub dual_stack: bool,
    /// Has the definitions of `deploy/crds` from the start.
    pub definitions: bool,
    /// More flags of the API server, such as `--etcd-compaction-interval=1s`.
    pub api_flags: Vec<String>,
}

/// A Kubernetes API server with its etcd. All servers end when it is dropped.
pub struct KubeApi {
    etcd: Etcd,
    api: Server,
    controllers: Option<Server>,
    scheduler: Option<Server>,
    address: SocketAddrV4,
    authority: Authority,
    tokens: Tokens,
    binary: PathBuf,
    folder: PathBuf,
    guard: Arc<Guard>,
}

impl KubeApi {
    /// Starts the servers and waits until they are ready.
    ///
    /// # Errors
    ///
    /// A program is missing, or a server does not start.
    pub fn start(options: &KubeOptions) -> Result<Self, Error> {
        let binary = Program::Kube.find()?;
        let guard = Arc::new(Guard::new("tortie-kube-")?);
        let is_prepared =
            !options.dual_stack && prepared::copy_to(guard.folder(), &binary, options.definitions)?;
        let kube = Self::start_in(guard, binary, options)?;
        if options.definitions && !is_prepared {
            kube.create_definitions()?;
        }
        Ok(kube)
    }

    /// Starts the servers without the data that others start from.
    pub(crate) fn start_on_empty_etcd(options: &KubeOptions) -> Result<Self, Error> {
        Self::start_in(Arc::new(Guard::new("tortie-kube-")?), Program::Kube.find()?, options)
    }

    fn start_in(guard: Arc<Guard>, binary: PathBuf, options: &KubeOptions) -> Result<Self, Error> {
        let etcd = Etcd::start_in(
            Arc::clone(&guard),
            &EtcdOptions { version: EtcdVersion::Kubernetes, members: 1, tls: false },
        )?;
        let folder = guard.folder().to_owned();
        let authority = Authority::new(&folder)?;
        let address = match options.listen {
            Some((address, port)) => SocketAddrV4::new(address, port),
            None => SocketAddrV4::new(Ipv4Addr::LOCALHOST, ports::free_port()?),
        };

        let mut users = vec![(ADMIN.to_owned(), vec!["system:masters".to_owned()])];
        users.extend(options.users.iter().cloned());
        let tokens = Tokens::new(&users);
        write(&folder.join("tokens.csv"), &tokens.file(&users))?;
        for (user, _) in &users {
            let path = kubeconfig_path(&folder, user);
            write(&path, &kubeconfig(address, &authority.certificate(), &tokens.of(user)))?;
        }
        let accounts = ServiceAccountKey::new(&folder)?;
        let server = authority.server_at("kube-apiserver", &[*address.ip(), SERVICE])?;
        let mut flags = api_flags(address, &etcd, &authority, &server, &accounts, options, &folder);
        if options.nodes {
            let client = authority.client("kube-apiserver-kubelet-client", &["system:masters"])?;
            flags.extend(node_flags(&client));
        }
        // The last flag of a name counts.
        flags.extend(options.api_flags.iter().cloned());
        let command = component(&binary, "kube-apiserver", flags);
        let answers = kubectl(&binary, &folder, ADMIN, &["get", "--raw=/readyz", "--request-timeout=5s"]);
        // kubectl is a large program: it does not run before somebody can answer.
        let ready = move || listens(address) && answers();
        let api = Server::spawn(&guard, "kube-apiserver", command, ready)?;
        api.wait_until_ready()?;

        let admin = kubeconfig_path(&folder, ADMIN);
        let mut controllers = None;
        if options.controllers {
            let port = ports::free_port()?;
            let command = component(
                &binary,
                "kube-controller-manager",
                controller_flags(port, &admin, &authority, &accounts),
            );
            // Its first visible work. Pods cannot be created before.
            let account = ["get", "serviceaccount", "default", "--namespace=default"];
            let has_account = kubectl(&binary, &folder, ADMIN, &account);
            let ready = move || listens(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)) && has_account();
            controllers = Some(Server::spawn(&guard, "kube-controller-manager", command, ready)?);
        }
        let mut scheduler = None;
        if options.scheduler {
            let port = ports::free_port()?;
            let command = component(&binary, "kube-scheduler", scheduler_flags(port, &admin));
            scheduler = Some(Server::spawn(&guard, "kube-scheduler", command, move || {
                listens(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
            })?);
        }
        for server in controllers.iter().chain(&scheduler) {
            server.wait_until_ready()?;
        }
        Ok(Self { etcd, api, controllers, scheduler, address, authority, tokens, binary, folder, guard })
    }

    /// The API server.
    #[must_use]
    pub fn api(&self) -> &Server {
        &self.api
    }

    /// The API server's datastore.
    #[must_use]
    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    /// The controller manager, if it was requested.
    #[must_use]
    pub fn controllers(&self) -> Option<&Server> {
        self.controllers.as_ref()
    }

    /// The scheduler, if it was requested.
    #[must_use]
    pub fn scheduler(&self) -> Option<&Server> {
        self.scheduler.as_ref()
    }

    /// The API server's URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// The API server's port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The authority of the API server's certificate. The API server accepts clients' certificates of it, too.
    #[must_use]
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The bearer token of a user.
    #[must_use]
    pub fn token(&self, user: &str) -> String {
        self.tokens.of(user)
    }

    /// The kubeconfig file of the administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig_of(ADMIN)
    }

    /// The kubeconfig file of a user of [`KubeOptions::users`].
    #[must_use]
    pub fn kubeconfig_of(&self, user: &str) -> PathBuf {
        kubeconfig_path(&self.folder, user)
    }

    /// Writes a kubeconfig file of this user for another port, such as that of a [`crate::Proxy`].
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn kubeconfig_at(&self, user: &str, port: u16) -> Result<PathBuf, Error> {
        let path = self.folder.join(format!("{}-{port}.kubeconfig", file_name(user)));
        let address = SocketAddrV4::new(*self.address.ip(), port);
        write(&path, &kubeconfig(address, &self.authority.certificate(), &self.tokens.of(user)))?;
        Ok(path)
    }

    /// Runs kubectl with these arguments as the administrator, and returns its output.
    ///
    /// # Errors
    ///
    /// The command fails.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String, Error> {
        self.kubectl_as(ADMIN, arguments)
    }

    /// Runs kubectl with these arguments as a user, and returns its output.
    ///
    /// # Errors
    ///
    /// The command fails.
    pub fn kubectl_as(&self, user: &str, arguments: &[&str]) -> Result<String, Error> {
        programs::run(kubectl_command(&self.binary, &self.folder, user, arguments))
    }

    /// The folder of the servers' files.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The process that starts the servers. More servers may share it.
    pub(crate) fn guard(&self) -> &Arc<Guard> {
        &self.guard
    }

    /// Creates the definitions of `deploy/crds`, and waits until the API server serves them.
    ///
    /// # Errors
    ///
    /// The API server rejects a definition.
    pub fn create_definitions(&self) -> Result<(), Error> {
        let folder = programs::workspace().join("deploy/crds").display().to_string();
        self.kubectl(&["create", "-f", &folder])?;
        self.kubectl(&["wait", "crd", "--all", "--for=condition=Established", "--timeout=60s"])?;
        Ok(())
    }

    /// Applies a manifest as the administrator, and returns kubectl's output.
    ///
    /// # Errors
    ///
    /// The API server rejects the manifest.
    pub fn apply(&self, manifest: &str) -> Result<String, Error> {
        let file = tempfile::Builder::new().suffix(".yaml").tempfile_in(&self.folder);
        let file = file.map_err(crate::error::io("creating a file for a manifest"))?;
        write(file.path(), manifest)?;
        self.kubectl(&["apply", "-f", &file.path().display().to_string()])
    }
}

/// The key that signs the tokens of service accounts.
struct ServiceAccountKey {
    private: PathBuf,
    public: PathBuf,
}

impl ServiceAccountKey {
    fn new(folder: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Certificate { subject: "service accounts".to_owned(), source };
        let key = KeyPair::generate().map_err(failed)?;
        let files = Self {
            private: folder.join("service-accounts.key"),
            public: folder.join("service-accounts.pub"),
        };
        write(&files.private, &key.serialize_pem())?;
        write(&files.public, &key.public_key_pem())?;
        Ok(files)
    }
}

fn component(binary: &Path, name: &str, flags: Vec<String>) -> Vec<String> {
    [binary.display().to_string(), name.to_owned()].into_iter().chain(flags).collect()
}

fn api_flags(
    address: SocketAddrV4,
    etcd: &Etcd,
    authority: &Authority,
    server: &Identity,
    accounts: &ServiceAccountKey,
    options: &KubeOptions,
    folder: &Path,
) -> Vec<String> {
    let mut flags = vec![
        format!("--etcd-servers={}", etcd.endpoints().join(",")),
        format!("--bind-address={}", address.ip()),
        format!("--advertise-address={}", address.ip()),
        format!("--secure-port={}", address.port()),
        format!("--cert-dir={}", folder.display()),
        format!("--tls-cert-file={}", server.certificate.display()),
        format!("--tls-private-key-file={}", server.key.display()),
        format!("--client-ca-file={}", authority.certificate().display()),
        format!("--token-auth-file={}", folder.join("tokens.csv").display()),
        format!("--authorization-mode={}", if options.nodes { "Node,RBAC" } else { "RBAC" }),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", accounts.public.display()),
        format!("--service-account-signing-key-file={}", accounts.private.display()),
        format!(
            "--service-cluster-ip-range=10.96.0.0/16{}",
            if options.dual_stack { ",fd00:96::/112" } else { "" }
        ),
        "--allow-privileged".to_owned(),
        // Otherwise `exec` asks DNS for the node's name.
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        // The service `kubernetes` may not point to loopback; nobody here uses it.
        "--endpoint-reconciler-type=none".to_owned(),
        "--profiling=false".to_owned(),
    ];
    if !options.controllers {
        // Nobody creates the service accounts that it requires of pods.
        flags.push("--disable-admission-plugins=ServiceAccount".to_owned());
    }
    flags
}

/// What the API server needs in addition where kubelets and pods use it.
fn node_flags(client: &Identity) -> [String; 3] {
    [
        // `exec` and `logs` are calls of the API server to the kubelet.
        format!("--kubelet-client-certificate={}", client.certificate.display()),
        format!("--kubelet-client-key={}", client.key.display()),
        "--endpoint-reconciler-type=lease".to_owned(),
    ]
}

fn controller_flags(
    port: u16,
    kubeconfig: &Path,
    authority: &Authority,
    accounts: &ServiceAccountKey,
) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={port}"),
        "--leader-elect=false".to_owned(),
        format!("--root-ca-file={}", authority.certificate().display()),
        format!("--service-account-private-key-file={}", accounts.private.display()),
    ]
}

fn scheduler_flags(port: u16, kubeconfig: &Path) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        "--bind-address=127.0.0.1".to_owned(),
        format!("--secure-port={port}"),
        "--leader-elect=false".to_owned(),
    ]
}

/// The bearer tokens of users. Nobody can guess them, because pods of a lab reach its API server.
struct Tokens(BTreeMap<String, String>);

impl Tokens {
    fn new(users: &[(String, Vec<String>)]) -> Self {
        Self(users.iter().map(|(user, _)| (user.clone(), Uuid::new_v4().simple().to_string())).collect())
    }

    /// That of a user whom the server does not know is known to nobody.
    fn of(&self, user: &str) -> String {
        self.0.get(user).cloned().unwrap_or_else(|| Uuid::new_v4().simple().to_string())
    }

    /// The file of `--token-auth-file`: token, user, uid, groups.
    fn file(&self, users: &[(String, Vec<String>)]) -> String {
        users
            .iter()
            .map(|(user, groups)| {
                format!("{},{user},uid-of-{user},\"{}\"\n", self.of(user), groups.join(","))
            })
            .collect()
    }
}

fn kubeconfig_path(folder: &Path, user: &str) -> PathBuf {
    folder.join(format!("{}.kubeconfig", file_name(user)))
}

fn kubeconfig(address: SocketAddrV4, authority: &Path, token: &str) -> String {
    format!(
        "apiVersion: v1
kind: Config
current-context: test
clusters:
- name: test
  cluster:
    server: https://{address}
    certificate-authority: {}
users:
- name: user
  user:
    token: {}
contexts:
- name: test
  context: {{cluster: test, user: user}}
",
        authority.display(),
        token
    )
}

fn kubectl_command(binary: &Path, folder: &Path, user: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary);
    // kubectl keeps what it learns about the API below HOME.
    command.env_clear().env("HOME", folder).stdin(Stdio::null());
    command.arg("kubectl").arg("--kubeconfig").arg(kubeconfig_path(folder, user)).args(arguments);
    command
}

/// A check that runs kubectl.
fn kubectl(
    binary: &Path,
    folder: &Path,
    user: &str,
    arguments: &[&'static str],
) -> impl Fn() -> bool + Send + Sync + 'static {
    let (binary, folder, user) = (binary.to_owned(), folder.to_owned(), user.to_owned());
    let arguments = arguments.to_vec();
    move || {
        let is_ready = programs::run(kubectl_command(&binary, &folder, &user, &arguments)).is_ok();
        if !is_ready {
            // kubectl is a large program: leave the processor to the server.
            std::thread::sleep(Duration::from_millis(100));
        }
        is_ready
    }
}
