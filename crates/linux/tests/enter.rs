//! A process that moves itself into new namespaces: as root, and as an ordinary user.
//!
//! The program runs itself again for each case, because each case needs a process with one thread.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // a test, though clippy does not see that without #[test]

#[cfg(target_os = "linux")]
mod common;

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("inside") => linux::inside(),
        Some("first") => linux::first_process(),
        Some("threads") => linux::with_threads(),
        _ => linux::parent(),
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::net::IpAddr;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Output, id};
    use std::sync::Arc;
    use std::{env, fs};

    use tortie_api::net::Action;
    use tortie_dataplane::Report;
    use tortie_kernel::namespace::{Namespaces, NetNs, enter, mount};

    use tortie_policy::program::*;

    use crate::common::cluster::*;

    const ALL: Namespaces = Namespaces { user: true, mount: true, net: true, pid: true };

    /// Runs each case in a child and prints its output.
    pub(crate) fn parent() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = folder.path().join("enter");
        fs::copy(env::current_exe().unwrap(), &program).unwrap();

        let root = rustix::process::getuid().is_root();
        println!("the caller enters new namespaces");
        succeed(run(&program, "inside", None));
        if root {
            println!("an ordinary user enters new namespaces");
            succeed(run(&program, "inside", Some(65534)));
        }
        println!("a process with several threads is told so");
        succeed(run(&program, "threads", None));
    }

    fn run(program: &Path, case: &str, user: Option<u32>) -> Output {
        let mut command = Command::new(program);
        command.arg(case).current_dir("/");
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        command.output().unwrap()
    }

    fn succeed(output: Output) {
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{printed}");
    }

    pub(crate) fn inside() {
        let outside = NetNs::current().unwrap().id().unwrap();
        enter(ALL).unwrap();
        assert_ne!(NetNs::current().unwrap().id().unwrap(), outside);
        assert!(rustix::process::getuid().is_root());
        assert!(rustix::process::getgid().is_root());
        assert!(
            std::thread::Builder::new().spawn(|| ()).is_err(),
            "no threads, as enter's documentation says"
        );
        // By /proc/self/exe, because this user may not have access to the program's folder.
        let child = Command::new("/proc/self/exe").arg("first").status().unwrap();
        assert!(child.success());
    }

    /// What a lab does: its own folder in memory, namespaces of nodes at paths in it, processes inside.
    pub(crate) fn first_process() {
        assert_eq!(id(), 1);
        let folder = PathBuf::from("/tmp");
        mount::tmpfs(&folder).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        let proc = folder.join("proc");
        fs::create_dir(&proc).unwrap();
        mount::proc(&proc).unwrap();
        assert_eq!(fs::read_link(proc.join("self")).unwrap(), PathBuf::from("1"));

        let node = NetNs::create().unwrap();
        node.bind_to(&folder.join("node")).unwrap();
        let mut command = Command::new("readlink");
        command.arg("/proc/self/ns/net");
        let output = node.enter_on_spawn(&mut command).unwrap().output().unwrap();
        assert!(output.status.success());
        NetNs::unbind(&folder.join("node")).unwrap();
        pods_and_policy();
        mount::unmount(&proc).unwrap();
        mount::unmount(&folder).unwrap();
    }

    /// Pods, and policy with a set that does not fit into the socket's buffer, which an ordinary user cannot raise.
    fn pods_and_policy() {
        let mut node = Node::new(&Underlay::new(), 1);
        let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
        server.serve(80);
        let members =
            (0..50_000u32).map(|n| Member::Net(IpAddr::from((0x0b00_0000 + n).to_be_bytes()).into()));
        let clients = SetId::new("s:clients");
        let report = node.change(|state| {
            open_profile(state);
            state.sets.insert(clients.clone(), (SetKind::Nets, members.collect()));
            let source = EntityMatch { sets: vec![clients.clone()], ..EntityMatch::default() };
            let rule = Rule { source, ..Rule::all(Action::Allow) };
            let rules = PolicyRules { ingress: vec![rule], egress: vec![] };
            state.policies.insert(policy_id("clients"), Arc::new(rules));
        });
        assert_eq!(report, Report::default());
        node.add(&client, open());
        node.add(&server, ingress(&["clients"], EndOfTier::Deny));
        assert!(client.is_cut_off(server.address, 80) && node.reaches(&server, 80));
        let member = Member::Net(IpAddr::from(client.address).into());
        node.change(|state| state.sets.get_mut(&clients).unwrap().1.make_mut().extend([member]));
        assert!(client.reaches(&server, 80));
        assert_eq!(node.resync(), Report::default());
        assert!(client.reaches(&server, 80));
    }

    pub(crate) fn with_threads() {
        let (stop, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || wait.recv());
        let error = enter(ALL).unwrap_err().to_string();
        assert!(error.contains("several threads"), "{error}");
        drop(stop);
        let _ = thread.join();
    }
}
