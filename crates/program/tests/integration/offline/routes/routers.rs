//! Routers that load the text.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::{NetNs, die_with_parent};
use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, RouteSocket};
use tortie_servers::programs::{Program, can_run};

use super::since::{LATER, later, since, with_two_at, without_two};
use super::{ROUTES, cluster, ok};

/// The kernel of a router that runs the commands has the routes, and after the commands of the changes exactly the new ones.
#[test]
fn a_linux_router_follows_the_changes() {
    let router = router();
    let run = |commands: &str| {
        let mut command = Command::new("sh");
        command.args(["-e", "-c", commands]).stdin(Stdio::null());
        router.enter_on_spawn(&mut command).unwrap();
        let output = command.output().unwrap();
        assert!(output.status.success(), "{commands}: {output:?}");
    };
    run(&ok(&["--for", "linux"]));
    wait_for_routes(&router, "iproute2");
    run(&since(&later(), &["--for", "linux"]).1);
    wait_for(&router, "iproute2", &LATER);
}

/// The documented loop runs on a router. A run is killed between two commands, another one meets a node that the router does not reach, and
/// the cluster changes each time. In the end, the router has exactly the routes of the cluster.
#[test]
fn a_router_follows_the_documented_loop_after_interruptions() {
    let (router, folder) = (router(), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name);
    fs::write(path("known.json"), "[]").unwrap();
    fs::write(path("loop.sh"), documented_loop()).unwrap();
    let program = format!(
        "#!/bin/sh\n[ \"$1\" != get ] || exec cat now.json\nexec {} \"$@\"\n",
        env!("CARGO_BIN_EXE_tortie")
    );
    testkit::executables::write_script(&path("tortie"), &program);
    let run = |script: &str| {
        let mut command = Command::new("sh");
        let programs = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
        command.arg(script).current_dir(folder.path()).env("PATH", programs).stdin(Stdio::null());
        router.enter_on_spawn(&mut command).unwrap();
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    fs::write(path("now.json"), cluster()).unwrap();
    assert_eq!(run("loop.sh"), (true, String::new()));
    wait_for_routes(&router, "iproute2");

    // The script ends after its first command, which leads a route of `two` to 192.0.2.8.
    fs::write(path("now.json"), with_two_at(8)).unwrap();
    let interrupted = documented_loop().replace("sh changes.sh", "head -n 2 changes.sh | sh; exit 1");
    fs::write(path("interrupted.sh"), interrupted).unwrap();
    assert!(!run("interrupted.sh").0);
    let of_two = |host: u8| {
        let next_hop = format!("192.0.2.{host}");
        ROUTES.map(|(to, by)| (to, if by == "192.0.2.2" { next_hop.clone() } else { by.to_owned() }))
    };
    let some = ROUTES.map(|(to, by)| (to, if to == "10.244.0.1/32" { "192.0.2.8" } else { by }));
    wait_for(&router, "the interrupted run", &some);

    // A later run does not reach the new address of `two`. The other changes do not wait for it.
    let mut unreached: Value = serde_json::from_str(&later()).unwrap();
    let address = json!({"projectcalico.org/IPv4Address": "198.51.100.9/24"});
    unreached["items"][1]["metadata"]["annotations"] = address;
    fs::write(path("now.json"), unreached.to_string()).unwrap();
    for _ in 0..2 {
        let (succeeded, errors) = run("loop.sh");
        assert!(!succeeded && errors.contains("failed: 10.244.0.1/32 10.244.9.1/32\n"), "{errors}");
        let expected = [
            ("10.244.0.0/30", "192.0.2.1"),
            ("10.244.0.1/32", "192.0.2.8"),
            ("10.244.0.128/30", "192.0.2.1"),
            ("10.244.9.1/32", "192.0.2.1"),
            ("fd00:10::/126", "fd02::1"),
        ];
        wait_for(&router, "the run with a node out of reach", &expected);
    }

    // The route of the interrupted run is gone, too.
    fs::write(path("now.json"), without_two()).unwrap();
    assert_eq!(run("loop.sh"), (true, String::new()));
    wait_for(&router, "the run without the node", &ROUTES[..1]);
    // A run that ends before its first command has added nothing.
    fs::write(path("now.json"), with_two_at(9)).unwrap();
    fs::write(path("interrupted.sh"), documented_loop().replace("sh changes.sh", "exit 1")).unwrap();
    assert!(!run("interrupted.sh").0);
    assert_eq!(run("loop.sh"), (true, String::new()));
    let all = of_two(9);
    wait_for(&router, "the last run", &all.each_ref().map(|(to, by)| (*to, by.as_str())));
    assert_eq!(run("changes.sh"), (true, String::new()), "the same commands once more");
    assert_eq!(run("loop.sh"), (true, String::new()));
    assert_eq!(fs::read_to_string(path("changes.sh")).unwrap(), "");
}

/// The loop in the documentation.
fn documented_loop() -> String {
    let lines = include_str!("../../../../../../docs/operate.md").lines();
    let from = lines.skip_while(|line| *line != "    set -e");
    let all: Vec<&str> = from.map_while(|line| line.strip_prefix("    ")).collect();
    assert!(all.len() > 3 && all.contains(&"sh changes.sh"), "{all:?}");
    all.join("\n") + "\n"
}

/// A router with an interface to the nodes.
fn router() -> NetNs {
    let router = NetNs::create().unwrap();
    router
        .run(|| {
            let mut socket = RouteSocket::open().unwrap();
            socket.create(&NewLink { up: true, ..NewLink::new("nodes", NewLinkKind::Bridge) }).unwrap();
            let link = interface_index("nodes").unwrap();
            let loopback = interface_index("lo").unwrap();
            socket.change(&Change::SetLink(loopback, vec![LinkSetting::Up(true)])).unwrap();
            for (address, prefix_length) in [("192.0.2.254", 24), ("fd02::fe", 64)] {
                let address = address.parse().unwrap();
                socket.change(&Change::AddAddress(Address { link, address, prefix_length })).unwrap();
            }
        })
        .unwrap();
    router
}

/// Waits until the kernel of the router has the routes.
fn wait_for_routes(router: &NetNs, of: &str) {
    wait_for(router, of, &ROUTES);
}

fn wait_for(router: &NetNs, of: &str, expected: &[(&str, &str)]) {
    let expected: Vec<(IpNet, String)> =
        expected.iter().map(|(to, by)| (to.parse().unwrap(), (*by).to_owned())).collect();
    let begin = Instant::now();
    loop {
        let routes = router.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
        let mut found: Vec<(IpNet, String)> = routes
            .into_iter()
            .filter_map(|route| Some((route.destination, route.gateway?.to_string())))
            .collect();
        found.sort();
        if found == expected {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{of}: {found:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A program in the namespace of a router. It ends with the value.
struct Daemon(Child);

impl Daemon {
    fn start(router: &NetNs, program: &Path, arguments: &[&str], log: &Path) -> Self {
        let mut command = Command::new(program);
        let log = fs::File::create(log).unwrap();
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        router.enter_on_spawn(&mut command).unwrap();
        Self(die_with_parent(&mut command).spawn().unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn bird_loads_the_routes() {
    if !can_run(&[Program::Bird]) {
        return;
    }
    let (router, folder) = (router(), tempfile::tempdir().unwrap());
    let file = folder.path().join("bird.conf");
    let kernel = |family: &str| format!("protocol kernel {{ {family} {{ export all; }}; }}\n");
    let text = format!(
        "router id 192.0.2.254;\nprotocol device {{}}\n{}{}{}",
        kernel("ipv4"),
        kernel("ipv6"),
        ok(&["--for", "bird"])
    );
    fs::write(&file, text).unwrap();
    let (file, socket) = (file.display().to_string(), folder.path().join("bird.ctl").display().to_string());
    let log = folder.path().join("log");
    let bird = Program::Bird.find().unwrap();
    let _daemon = Daemon::start(&router, &bird, &["-f", "-c", &file, "-s", &socket], &log);
    wait_for_routes(&router, "BIRD");
}

#[test]
fn frr_loads_the_routes() {
    if !can_run(&[Program::FrrBgpd]) {
        return;
    }
    let (router, folder) = (router(), tempfile::tempdir().unwrap());
    // FRR's programs give up root.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let programs = Program::FrrBgpd.find().unwrap();
    let programs = programs.parent().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(folder.path().join("staticd.conf"), ok(&["--for", "frr"])).unwrap();
    fs::write(folder.path().join("zebra.conf"), "").unwrap();
    let start = |name: &str| {
        let (config, pid, log) = (
            path(&format!("{name}.conf")),
            path(&format!("{name}.pid")),
            folder.path().join(format!("{name}.log")),
        );
        let arguments = [
            "-f",
            &config,
            "-i",
            &pid,
            "-z",
            &path("zserv"),
            "--vty_socket",
            &path(""),
            "-u",
            "frr",
            "-g",
            "frr",
        ];
        Daemon::start(&router, &programs.join(name), &arguments, &log)
    };
    let _zebra = start("zebra");
    let begin = Instant::now();
    while !folder.path().join("zserv").exists() {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "{}",
            fs::read_to_string(folder.path().join("zebra.log")).unwrap()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let _staticd = start("staticd");
    wait_for_routes(&router, "FRR");
}
