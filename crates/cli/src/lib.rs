//! The subcommands of `tortie`.
//!
//! [`run`] is the whole program. Packages contain it as it is; a source build adds a [`Lab`]. Depending on the name it is
//! called by, it is also the CNI plugin (`tortie-cni`).

mod agent;
mod apply;
#[cfg(unix)]
mod archive;
mod bgp;
mod calico;
mod calicoctl;
mod certs;
mod checks;
#[cfg(unix)]
mod cluster;
mod completed;
mod concerned;
mod connectivity;
#[cfg(unix)]
mod controllers;
mod convert;
mod cost;
mod datastore;
mod decided;
mod delete;
mod describe;
mod diff;
mod doubts;
mod editor;
#[cfg(windows)]
mod event_log;
mod expectations;
mod explain;
mod filenames;
mod filter;
mod flannel_etcd;
mod get;
mod html;
mod ignored;
mod install;
mod ipam;
mod junit;
mod kustomize;
mod lab;
mod lint;
#[cfg(any(windows, test))]
mod log_file;
mod log_filter;
mod log_limit;
mod manifests;
mod matrix;
mod modify;
#[cfg(unix)]
mod node;
mod node_name;
pub mod output;
mod planned;
mod policy;
mod pool;
mod port;
mod preview;
mod progress;
mod routes;
#[cfg(unix)]
mod serve;
mod service;
mod service_proxy;
mod show;
mod signals;
mod snapshot;
mod status;
mod store;
#[cfg(unix)]
mod store_files;
mod table;
mod targets;
mod uninstall;
mod validate;
mod version;
mod vxlan_ports;
mod wait;
#[cfg(windows)]
mod windows;
mod words;

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use apply::Expects;
use clap::{CommandFactory, Parser, Subcommand};
pub use lab::{Lab, LabState};
use log_limit::Limited;
pub use port::tcp as tcp_port;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// The allocator of the static programs. That of musl takes a lock for each call, which costs a fifth of a CNI ADD
/// (docs/bench.md).
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Networking and network policy for Kubernetes clusters that mix Linux and Windows nodes.
#[derive(Parser)]
#[command(name = "tortie", version)]
struct Arguments {
    /// The level of the log: error, warn, info, debug or trace. RUST_LOG says more
    #[arg(short, long, value_name = "LEVEL", value_parser = log_filter::log_level)]
    log_level: Option<&'static str>,
    /// An option of calicoctl; Tortie reads objects of all known versions
    #[arg(long, hide = true)]
    allow_version_mismatch: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Lab(lab::LabVerb),
    /// Create or change the objects of manifests
    Apply(apply::Apply),
    /// Create the objects of manifests; none of them may exist
    Create(apply::Apply),
    /// Change the objects of manifests; all of them must exist
    Replace(apply::Apply),
    /// Delete objects, by manifest, by name or by labels
    Delete(delete::Delete),
    /// Change fields of stored objects by a patch
    Patch(modify::Patch),
    /// Change stored objects in an editor
    Edit(modify::Edit),
    /// Set and remove labels of stored objects
    Label(modify::Mark),
    /// Set and remove annotations of stored objects
    Annotate(modify::Mark),
    /// Show objects
    Get(get::Get),
    /// Show objects with what applies to them, or what they apply to, and what nodes report about them
    Describe(describe::Describe),
    /// Show what apply would change: in stored objects, and in verdicts
    Diff(diff::Diff),
    /// Check manifests without a cluster
    Validate(validate::Validate),
    /// Convert policies between Kubernetes' form and Calico's (v3; Calico's API v1 is refused)
    Convert(convert::Convert),
    /// Show what the cluster consists of, or write it into an archive for bug reports
    #[cfg(unix)]
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Test a cluster with pods of its own: pods, nodes, Services, DNS, MTU and policy
    #[command(subcommand)]
    Connectivity(connectivity::ConnectivityCommand),
    /// Show the versions of this program, of the agents, and of Calico
    Version(version::Version),
    /// Print the completion script for a shell: source <(tortie completion bash)
    Completion(version::Completion),
    /// Write man pages into a folder
    Man(version::Man),
    /// Explain whether a packet would pass, in a cluster or in manifests
    Explain(Box<explain::Explain>),
    /// Show who reaches whom, and by which rule, in a cluster or in manifests
    Matrix(Box<matrix::Matrix>),
    /// Show which verdicts a change alters, and by which rule
    Preview(Box<preview::Preview>),
    /// Check and show policies
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Stop Calico's components after Tortie has taken over, or start them again
    #[command(subcommand)]
    Calico(calico::CalicoCommand),
    /// Install Tortie in a Kubernetes cluster, or print its manifests
    Install(Box<install::Install>),
    /// Show the nodes, what is in force there, and what is wrong
    Status(status::Status),
    /// Remove Tortie from a Kubernetes cluster and its nodes
    Uninstall(uninstall::Uninstall),
    /// Show, check and repair the addresses of pods
    #[command(subcommand)]
    Ipam(ipam::IpamCommand),
    /// Move a cluster to another pool of addresses
    #[command(subcommand)]
    Pool(pool::PoolCommand),
    /// Copy a datastore into another one: lock, export, import, compare, unlock
    #[command(subcommand)]
    Datastore(datastore::DatastoreCommand),
    /// Serve the embedded datastore
    #[command(subcommand)]
    #[cfg(unix)]
    Store(serve::StoreCommand),
    /// Issue the certificates of the embedded datastore
    #[command(subcommand)]
    Certs(certs::CertsCommand),
    /// Show what the BGP speaker of this node knows
    #[command(subcommand)]
    Bgp(bgp::BgpCommand),
    /// Print the routes that a router needs to reach the pods, for a router or a cloud
    Routes(Box<routes::Routes>),
    /// Run the node daemon
    Agent(Box<agent::Agent>),
    /// Prepare this node, or clean it up; the pods of an installation run this
    #[cfg(unix)]
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Commands for this Windows node
    #[cfg(windows)]
    #[command(subcommand)]
    Windows(windows::WindowsCommand),
    /// Run what a cluster needs once: copies in etcd, vanished nodes, automatic host endpoints
    #[cfg(unix)]
    Controllers(Box<controllers::Controllers>),
}

/// Runs the program with the arguments of this process.
pub fn run(lab: Option<&'static dyn Lab>) -> ExitCode {
    let called = std::env::args_os().next();
    let called = called
        .as_deref()
        .map(Path::new)
        .and_then(Path::file_name)
        .and_then(OsStr::to_str)
        .unwrap_or("tortie");
    if ["tortie-cni", "tortie-cni.exe"].contains(&called) {
        return tortie_cni::plugin::main();
    }
    if let Some(lab) = lab {
        if let Some(result) = lab.run_as(called) {
            return finish(result);
        }
        lab::set(lab);
    }
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return output::usage(&error),
    };
    if let Some(level) = arguments.log_level {
        // Only the first call has an effect, and this is the only one.
        log_filter::set_level(level);
    }
    let result = match arguments.command {
        Command::Lab(command) => command.run(),
        Command::Apply(apply) => apply.run(Expects::Either),
        Command::Create(create) => create.run(Expects::New),
        Command::Replace(replace) => replace.run(Expects::Existing),
        Command::Delete(delete) => delete.run(),
        Command::Patch(patch) => patch.run(),
        Command::Edit(edit) => edit.run(),
        Command::Label(label) => label.run("labels"),
        Command::Annotate(annotate) => annotate.run("annotations"),
        Command::Get(get) => get.run(),
        Command::Describe(describe) => describe.run(),
        Command::Diff(diff) => diff.run(),
        Command::Validate(validate) => validate.run(),
        Command::Convert(convert) => convert.run(),
        #[cfg(unix)]
        Command::Cluster(command) => command.run(),
        Command::Connectivity(command) => command.run(),
        Command::Version(version) => version.run(),
        Command::Completion(completion) => Ok(completion.run(Arguments::command())),
        Command::Man(man) => man.run(Arguments::command()),
        Command::Explain(explain) => explain.run(),
        Command::Matrix(matrix) => matrix.run(),
        Command::Preview(preview) => preview.run(),
        Command::Policy(policy) => policy.run(),
        Command::Calico(calico) => calico.run(),
        Command::Install(install) => install.run(),
        Command::Status(status) => status.run(),
        Command::Uninstall(uninstall) => uninstall.run(),
        Command::Ipam(command) => command.run(),
        Command::Pool(command) => command.run(),
        Command::Datastore(command) => command.run(),
        #[cfg(unix)]
        Command::Store(command) => command.run(),
        Command::Certs(command) => command.run(),
        Command::Bgp(command) => command.run(),
        Command::Routes(routes) => routes.run(),
        Command::Agent(agent) => agent.run(),
        #[cfg(windows)]
        Command::Windows(command) => command.run(),
        #[cfg(unix)]
        Command::Node(command) => command.run(),
        #[cfg(unix)]
        Command::Controllers(controllers) => controllers.run(),
    };
    finish(result)
}

/// Prints the error with its causes, once. Problems of manifests have already been printed line by line. An error exits with 2, because
/// 1 is an answer: something differs, is wrong or does not exist, or a part of the work failed.
fn finish(result: anyhow::Result<ExitCode>) -> ExitCode {
    let failed = ExitCode::from(2);
    let code = result.unwrap_or_else(|error| {
        output::error(&with_causes(&error));
        failed
    });
    output::end(code, failed)
}

/// Waits until the process is asked to end.
async fn end_of_process() -> std::io::Result<()> {
    tokio::select! {
        ended = signals::end() => ended,
        interrupted = tokio::signal::ctrl_c() => interrupted,
    }
}

/// The error with its causes, without those that the message already contains.
fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        already if already.contains(&cause) => text,
        already => format!("{already}: {cause}"),
    })
}

/// Logs go to standard error. `--log-level` or `RUST_LOG` sets the level; by default, a command logs warnings, and a daemon also logs
/// events.
pub fn log(default: &str) {
    let (_, filter) = log_filter::of_process(default);
    // Log files have no colours.
    let coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Limited::new(std::io::stderr));
    log.with_target(false).with_ansi(coloured).init();
}

/// As [`log`], with a function that changes the level.
fn changeable_log(default: &str) -> tortie_agent::LogLevel {
    let coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    changeable_log_to(default, BoxMakeWriter::new(std::io::stderr), coloured)
}

/// The same, to another place.
fn changeable_log_to(default: &str, place: BoxMakeWriter, coloured: bool) -> tortie_agent::LogLevel {
    let (text, filter) = log_filter::of_process(default);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Limited::new(place));
    let log = log.with_target(false).with_ansi(coloured).with_filter_reloading();
    let handle = log.reload_handle();
    log.init();
    let current = std::sync::Mutex::new(text);
    std::sync::Arc::new(move |new| {
        let mut current = current.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(new) = new {
            handle.reload(log_filter::parse(new)?).map_err(|error| error.to_string())?;
            new.clone_into(&mut current);
            tracing::info!(level = new, "an operator has changed the log level");
        }
        Ok(current.clone())
    })
}

/// A runtime with one thread for each processor.
///
/// # Errors
///
/// The system starts no more threads.
pub fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}
