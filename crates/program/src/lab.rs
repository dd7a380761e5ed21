//! `tortie lab`, and the other programs that the binary acts as in a lab.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use tortie_cli::{Lab, LabState, output};
use tortie_hcn::IpHelper;
use tortie_hns_emulator::{Config as HnsConfig, NodeHost, OnRewrite, ServiceConfig, run_service};
use tortie_lab::demo::{self, Manifests};
use tortie_lab::{
    Cluster, Datastore, LabDir, Outcome, Progress, Shape, WindowsPrograms, join, matrix, supervise,
    windows_programs,
};
use tortie_store::Endpoints;

/// The exit code that a shell uses for a program ended by Ctrl-C.
const INTERRUPTED: u8 = 130;
/// How long to wait until a lab has ended.
const DOWN_TIMEOUT: Duration = Duration::from_secs(30);

const MANIFESTS: Manifests<'static> = Manifests {
    pods: (
        "examples/seed-002/policy-demo-pods.yml",
        include_str!("../../../examples/seed-002/policy-demo-pods.yml"),
    ),
    policy: (
        "examples/seed-002/policy-demo-policy.yml",
        include_str!("../../../examples/seed-002/policy-demo-policy.yml"),
    ),
};

/// The lab of the user who runs this program.
pub(crate) struct LocalLab;

impl Lab for LocalLab {
    fn command(&self) -> Command {
        LabCommand::command()
    }

    fn run(&self, arguments: &ArgMatches) -> anyhow::Result<ExitCode> {
        LabCommand::from_arg_matches(arguments)?.run()
    }

    fn run_as(&self, name: &str) -> Option<anyhow::Result<ExitCode>> {
        match name {
            "tortie-hns" => Some(hns_process()),
            "tortie-pod" => Some(pod_process()),
            _ => None,
        }
    }

    fn state(&self) -> (PathBuf, LabState) {
        let dir = dir();
        let state = match () {
            () if dir.is_foreign() => LabState::Foreign,
            () if dir.in_use() => LabState::Running,
            () if dir.is_marked() => LabState::Ended,
            () => LabState::Absent,
        };
        (dir.path().to_owned(), state)
    }

    fn store(&self) -> Arc<dyn Endpoints> {
        Arc::new(tortie_lab::client(&dir()))
    }

    fn kubeconfig(&self) -> Option<PathBuf> {
        Some(dir().kubeconfig()).filter(|file| file.exists())
    }

    fn agent_socket(&self, node: &str) -> anyhow::Result<PathBuf> {
        let dir = dir();
        if dir.runs_wine(node) {
            bail!(
                "node {node} runs under Wine, and its named pipe is not reached from Linux; start the lab without --wine"
            );
        }
        Ok(dir.control_socket(node))
    }

    fn image(&self) -> &'static str {
        tortie_lab::PROGRAM_IMAGE
    }

    fn machine(&self) -> Arc<dyn IpHelper> {
        Arc::new(NodeHost)
    }
}

/// Run a mixed cluster on this machine, with real packets and an emulated HNS
#[derive(Parser)]
#[command(name = "lab")]
enum LabCommand {
    /// Start a cluster, deploy four pods, show who reaches whom before and after a policy, remove everything
    Demo {
        /// The output format of the result; progress goes to standard error
        #[arg(short, long, value_enum, default_value_t = LabFormat::Table)]
        output: LabFormat,
        /// The datastore; etcd needs the program etcd (Debian: etcd-server), kubernetes needs `cargo xtask kube build`
        #[arg(long, value_enum, default_value_t = DatastoreName::Embedded)]
        datastore: DatastoreName,
        /// Run the programs for Windows under Wine on Windows nodes: those of this folder, which also has the libraries; by
        /// default what `cargo xtask windows` has built
        #[arg(long, value_name = "FOLDER")]
        wine: Option<Option<PathBuf>>,
    },
    /// Start a cluster and keep it until Ctrl-C or `tortie lab down`
    Up {
        /// Number of Linux nodes: primary, linux-2, …
        #[arg(long, default_value_t = 1)]
        linux: usize,
        /// Number of Windows nodes: minion, windows-2, …
        #[arg(long, default_value_t = 1)]
        windows: usize,
        /// Run a BGP speaker on each Linux node, and with --l2bridge on each Windows node
        #[arg(long)]
        bgp: bool,
        /// Give pools without encapsulation direct routes on Linux nodes, and with --l2bridge on Windows nodes
        #[arg(long, conflicts_with = "bgp")]
        direct_routes: bool,
        /// Make networks of Windows nodes that take packets of pods without encapsulation instead of overlays; with --bgp or
        /// --direct-routes, the first pool has no encapsulation
        #[arg(long, conflicts_with = "wine")]
        l2bridge: bool,
        /// Give Linux nodes and their pods IPv6 addresses, too
        #[arg(long)]
        ipv6: bool,
        /// The datastore; etcd needs the program etcd (Debian: etcd-server), kubernetes needs `cargo xtask kube build`
        #[arg(long, value_enum, default_value_t = DatastoreName::Embedded)]
        datastore: DatastoreName,
        /// Run the programs for Windows under Wine on Windows nodes: those of this folder, which also has the libraries; by
        /// default what `cargo xtask windows` has built
        #[arg(long, value_name = "FOLDER")]
        wine: Option<Option<PathBuf>>,
    },
    /// End the running cluster
    Down,
    /// Run a command in a pod's network: POD is NAME or NAMESPACE/NAME
    Exec {
        /// The pod
        pod: String,
        /// The namespace of a pod that is given by its name alone
        #[arg(short, long, default_value = "default")]
        namespace: String,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run a command, such as tcpdump, in a node's network
    Capture {
        /// The node
        node: String,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run kubectl as the administrator of a lab with --datastore kubernetes
    Kubectl {
        /// The arguments of kubectl
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Show who reaches whom, by a real connection for each pair
    Matrix {
        /// The port, as 80 or tcp/80; by default the ports that the pods' containers name
        #[arg(long, value_parser = tortie_cli::tcp_port)]
        port: Option<u16>,
        /// The output format
        #[arg(short, long, value_enum, default_value_t = LabFormat::Table)]
        output: LabFormat,
    },
    /// The part of `demo` and `up` that runs inside the lab's namespaces
    #[command(hide = true)]
    Inside {
        #[command(subcommand)]
        what: Inside,
    },
}

#[derive(Subcommand)]
enum Inside {
    Demo {
        #[arg(long, value_enum)]
        output: LabFormat,
        #[arg(long, value_enum)]
        datastore: DatastoreName,
        #[arg(long)]
        wine: Option<PathBuf>,
    },
    Up {
        #[arg(long)]
        linux: usize,
        #[arg(long)]
        windows: usize,
        #[arg(long)]
        bgp: bool,
        #[arg(long)]
        direct_routes: bool,
        #[arg(long)]
        l2bridge: bool,
        #[arg(long)]
        ipv6: bool,
        #[arg(long, value_enum)]
        datastore: DatastoreName,
        #[arg(long)]
        wine: Option<PathBuf>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DatastoreName {
    Embedded,
    Etcd,
    Kubernetes,
}

impl From<DatastoreName> for Datastore {
    fn from(name: DatastoreName) -> Self {
        match name {
            DatastoreName::Embedded => Self::Embedded,
            DatastoreName::Etcd => Self::Etcd,
            DatastoreName::Kubernetes => Self::Kubernetes,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LabFormat {
    Table,
    Json,
}

/// The lab's folder: `TORTIE_LAB`, or the user's default folder.
fn dir() -> LabDir {
    LabDir::new(std::env::var_os("TORTIE_LAB").filter(|value| !value.is_empty()).map(PathBuf::from))
}

impl LabCommand {
    fn run(self) -> anyhow::Result<ExitCode> {
        tortie_cli::log("warn");
        let word = |format: LabFormat| if format == LabFormat::Json { "json" } else { "table" };
        let arguments = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        match self {
            Self::Demo { output, datastore, wine } => {
                let (datastore, wine) = (Datastore::from(datastore).name(), wine_option(wine)?);
                let mut options = vec!["--output", word(output), "--datastore", datastore];
                options.extend(wine.iter().flat_map(|folder| ["--wine", folder]));
                outer(&arguments(&[&["lab", "inside", "demo"][..], &options].concat()))
            }
            Self::Up { windows: 0, wine: Some(_), .. } => {
                bail!("--wine is for Windows nodes, and --windows 0 gives none; leave one of them out")
            }
            Self::Up { linux, windows, bgp, direct_routes, l2bridge, ipv6, datastore, wine } => {
                let (linux, windows) = (linux.to_string(), windows.to_string());
                let (datastore, wine) = (Datastore::from(datastore).name(), wine_option(wine)?);
                let mut options = vec!["--linux", &linux, "--windows", &windows, "--datastore", datastore];
                options.extend(bgp.then_some("--bgp"));
                options.extend(direct_routes.then_some("--direct-routes"));
                options.extend(l2bridge.then_some("--l2bridge"));
                options.extend(ipv6.then_some("--ipv6"));
                options.extend(wine.iter().flat_map(|folder| ["--wine", folder]));
                outer(&arguments(&[&["lab", "inside", "up"][..], &options].concat()))
            }
            Self::Down => down(),
            Self::Exec { pod, namespace, command } => {
                let (namespace, name) = pod.split_once('/').unwrap_or((&namespace, &pod));
                let netns = dir().pod_netns(namespace, name);
                join::join(&dir(), join::Next::RunCommand)?;
                Ok(join::exec(
                    &netns,
                    &format!("pod {namespace}/{name}"),
                    &command,
                    Some(&dir().resolver(namespace)),
                )?
                .into())
            }
            Self::Capture { node, command } => {
                let netns = dir().node_netns(&node);
                join::join(&dir(), join::Next::RunCommand)?;
                Ok(join::exec(&netns, &format!("node {node}"), &command, None)?.into())
            }
            Self::Kubectl { arguments } => {
                join::join(&dir(), join::Next::RunCommand)?;
                Ok(join::kubectl(&dir(), &arguments)?.into())
            }
            Self::Matrix { port, output } => show_matrix(port, output),
            Self::Inside { what } => {
                tortie_lab::enter_inside()?;
                tortie_cli::runtime()?.block_on(inside(what))
            }
        }
    }
}

/// The folder of the programs for Windows, which must have them, if these are wanted.
fn wine_option(wine: Option<Option<PathBuf>>) -> anyhow::Result<Option<String>> {
    let Some(folder) = wine else { return Ok(None) };
    let programs = WindowsPrograms::find(&folder.unwrap_or_else(windows_programs))?;
    let folder = programs.folder().to_str().context("--wine: the folder's name is no text")?;
    Ok(Some(folder.to_owned()))
}

fn outer(arguments: &[String]) -> anyhow::Result<ExitCode> {
    Ok(match supervise(&dir(), arguments)? {
        Outcome::Done => ExitCode::SUCCESS,
        Outcome::Failed => ExitCode::FAILURE,
        Outcome::Interrupted => ExitCode::from(INTERRUPTED),
    })
}

/// The first process inside the lab's namespaces.
async fn inside(what: Inside) -> anyhow::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // `tortie lab down` is the normal end of a cluster that is kept up. If the supervisor itself was asked to end, it
    // reports that.
    let ended = if matches!(what, Inside::Up { .. }) { 0 } else { INTERRUPTED };
    let end_requested = async {
        tokio::select! { _ = terminate.recv() => ended, _ = interrupt.recv() => INTERRUPTED }
    };
    tokio::select! {
        result = run_inside(what) => result,
        code = end_requested => {
            output::error_line("the lab is taken down");
            Ok(code.into())
        }
    }
}

async fn run_inside(what: Inside) -> anyhow::Result<ExitCode> {
    let progress = Progress::new();
    match what {
        Inside::Demo { output, datastore, wine } => {
            let wine = wine.as_deref().map(WindowsPrograms::find).transpose()?;
            let shape = Shape {
                linux: 1,
                windows: 1,
                bgp: false,
                direct_routes: false,
                l2bridge: false,
                ipv6: false,
                wine,
            };
            let cluster = Cluster::up(dir(), shape, datastore.into(), &progress).await?;
            let demo = demo::run(&cluster, &MANIFESTS, &progress, |step, before| {
                if output == LabFormat::Table {
                    output::text(&format!("\n{}:\n{}\n", step.name, matrix::table(step, before)));
                }
            });
            let demo = demo.await?;
            if output == LabFormat::Json {
                output::line(&serde_json::to_string(&demo)?);
            }
            cluster.down().await;
            progress.done("everything is taken down");
            if demo.steps.iter().any(lab_failed) {
                return Ok(ExitCode::FAILURE);
            }
        }
        Inside::Up { linux, windows, bgp, direct_routes, l2bridge, ipv6, datastore, wine } => {
            let wine = wine.as_deref().map(WindowsPrograms::find).transpose()?;
            let shape = Shape { linux, windows, bgp, direct_routes, l2bridge, ipv6, wine };
            let cluster = Cluster::up(dir(), shape, datastore.into(), &progress).await?;
            progress.done("the cluster is up; from another terminal: tortie apply -f, get, lab exec, lab matrix, lab down");
            std::future::pending::<()>().await;
            cluster.down().await;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn down() -> anyhow::Result<ExitCode> {
    let dir = dir();
    if !dir.in_use() {
        if !dir.is_marked() {
            bail!("no lab is running in {}", dir.path().display());
        }
        dir.remove(dir.take()?)?;
        output::line(&format!("removed {}, which a killed lab has left", dir.path().display()));
        return Ok(ExitCode::SUCCESS);
    }
    tortie_lab::signal_end(&dir)?;
    let deadline = Instant::now() + DOWN_TIMEOUT;
    while dir.path().exists() {
        if Instant::now() > deadline {
            bail!(
                "the lab in {} has not ended within {} seconds",
                dir.path().display(),
                DOWN_TIMEOUT.as_secs()
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    output::line("the lab is down");
    Ok(ExitCode::SUCCESS)
}

fn show_matrix(port: Option<u16>, format: LabFormat) -> anyhow::Result<ExitCode> {
    let dir = dir();
    join::join(&dir, join::Next::StartThreads)?;
    tortie_cli::runtime()?.block_on(async {
        let store = tortie_lab::client(&dir);
        let step = matrix::probe_all(&dir, &store, "now", port, &Progress::new()).await?;
        match format {
            LabFormat::Table => output::text(&matrix::table(&step, None)),
            LabFormat::Json => output::line(&serde_json::to_string(&step)?),
        }
        Ok(if lab_failed(&step) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

/// Reports how many connections say nothing about policy, because the lab itself failed.
fn lab_failed(step: &matrix::Step) -> bool {
    let failed = step.failed();
    if failed > 0 {
        let failed = output::count(failed as u64, "connection");
        output::error(&format!("{failed} failed because of the lab, and not because of policy"));
    }
    failed > 0
}

/// `tortie-hns SOCKET ADDRESS [LIBRARIES]`: the emulated HNS of a Windows node, and where it serves libraries under Wine.
fn hns_process() -> anyhow::Result<ExitCode> {
    tortie_cli::log("info");
    let (socket, address, libraries) = match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [socket, address] => (socket.into(), address.clone(), None),
        [socket, address, libraries] => (socket.into(), address.clone(), Some(libraries.parse()?)),
        arguments => bail!("expected two or three arguments, got {}", arguments.len()),
    };
    let address: Ipv4Addr = address.parse().with_context(|| format!("{address:?} is no IPv4 address"))?;
    // The lab shows the effect of policy. The effect of writing ACLs on Windows connections is not known well enough
    // to be shown as a fact.
    let hns = HnsConfig { on_rewrite: OnRewrite::Keep, ..HnsConfig::new(HnsConfig::SERVER_2022, address) };
    run_service(ServiceConfig { hns, socket, libraries })?;
    Ok(ExitCode::SUCCESS)
}

/// `tortie-pod NAMESPACE/NAME [PORT…]`, or `tortie-pod NAMESPACE/NAME --dns LAB`: the process in a pod.
fn pod_process() -> anyhow::Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().context("the pod's name is missing")?;
    let rest: Vec<String> = arguments.collect();
    if let [option, dir] = &rest[..]
        && option == "--dns"
    {
        tortie_lab::run_dns(&LabDir::new(Some(dir.into())))?;
        return Ok(ExitCode::SUCCESS);
    }
    let ports: Result<Vec<u16>, _> = rest.iter().map(|port| port.parse()).collect();
    tortie_lab::run_pod_process(&name, &ports.context("a port is no number")?)?;
    Ok(ExitCode::SUCCESS)
}
