//! The specification's own driver.

use std::process::Command;

use serde_json::{Value, json};
use tortie_servers::programs::{Program, can_run};

use crate::node::{Node, OTHER_PLUGINS, Sandbox, address, until};

#[test]
fn cnitool_adds_checks_and_deletes() {
    if !can_run(&[Program::Cnitool, Program::CniPlugins]) {
        return;
    }
    for (chained, version) in [
        (json!([]), "0.3.1"),
        (json!([]), "0.4.0"),
        (json!([{"type": "tuning", "sysctl": {"net.ipv4.conf.all.accept_redirects": "0"}}]), "1.0.0"),
        (json!([]), "1.1.0"),
    ] {
        let node = Node::new(&chained);
        let mut list = node.configuration();
        list["cniVersion"] = json!(version);
        list.as_object_mut().unwrap().remove("cniVersions");
        let folder = node.path("cnitool.d");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("10-tortie.conflist"), list.to_string()).unwrap();
        let pod = node.pod("p", json!({}));
        let tool = |command: &str, sandbox: &Sandbox| {
            let mut program = Command::new(Program::Cnitool.find().unwrap());
            program.args([command, list["name"].as_str().unwrap(), sandbox.path.to_str().unwrap()]);
            program
                .env("NETCONFPATH", &folder)
                .env("CNI_ARGS", &sandbox.args)
                .env("CNI_IFNAME", &sandbox.interface);
            program.env("CNI_PATH", format!("{}:{OTHER_PLUGINS}", node.path("bin").display()));
            // It caches results in a folder of the machine, by the container, whose name it makes from the path.
            let output = node.namespace.run(|| program.output().unwrap()).unwrap();
            let shown = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            (output.status.success(), shown)
        };
        let (ok, shown) = tool("add", &pod);
        assert!(ok, "{version}: {shown}");
        let result: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(result["cniVersion"], version);
        assert!(address(&result).to_string().starts_with("10.65."));
        let has_check = version != "0.3.1";
        let (ok, shown) = tool("check", &pod);
        assert_eq!(ok, has_check, "{version}: {shown}");
        if version == "1.1.0" {
            let (ok, shown) = tool("status", &pod);
            assert!(ok, "{shown}");
        }
        for _ in 0..2 {
            let (ok, shown) = tool("del", &pod);
            assert!(ok, "{version}: {shown}");
        }
        until("the interface goes", || !pod.has_interface("eth0"));
        if version == "1.1.0" {
            assert!(tool("add", &pod).0);
            // Its library deletes what it has cached, and calls GC without the list of valid attachments, which the
            // specification requires.
            let (ok, shown) = tool("gc", &pod);
            assert!(!ok && shown.contains("GC needs cni.dev/valid-attachments"), "{shown}");
            until("the interface goes", || !pod.has_interface("eth0"));
            assert!(tool("del", &pod).0);
        }
    }
}
