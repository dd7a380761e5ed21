//! A process that moves itself into new namespaces: as root, and as an ordinary user.
//!
//! The program runs itself again for each case, because each case needs a process with one thread.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // a test, though clippy does not see that without #[test]

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
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Output, id};
    use std::{env, fs};

    use tortie_linux::namespace::{Namespaces, NetNs, enter, mount};

    const ALL: Namespaces = Namespaces { user: true, mount: true, net: true, pid: true };

    /// Runs each case in a child and shows what it said.
    pub fn parent() {
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
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
    }

    pub fn inside() {
        let outside = NetNs::current().unwrap().id().unwrap();
        enter(ALL).unwrap();
        assert_ne!(NetNs::current().unwrap().id().unwrap(), outside);
        assert!(rustix::process::getuid().is_root());
        assert!(rustix::process::getgid().is_root());
        assert!(
            std::thread::Builder::new().spawn(|| ()).is_err(),
            "no threads, as enter's documentation says"
        );
        // By /proc/self/exe, as the program itself may lie where this user may not look.
        let child = Command::new("/proc/self/exe").arg("first").status().unwrap();
        assert!(child.success());
    }

    /// What a lab does: a folder of its own in memory, namespaces of nodes at paths in it, processes inside.
    pub fn first_process() {
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
        mount::unmount(&proc).unwrap();
        mount::unmount(&folder).unwrap();
    }

    pub fn with_threads() {
        let (stop, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || wait.recv());
        let error = enter(ALL).unwrap_err().to_string();
        assert!(error.contains("several threads"), "{error}");
        drop(stop);
        let _ = thread.join();
    }
}
