//! Addresses of host-local, which Tortie's plugin implements, and of other IPAM plugins, which it executes.

use std::fs;

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};
use tortie_servers::programs::{Program, can_run};

use crate::node::{Node, Sandbox, address, until};

/// The configuration of host-local with its files in the node's folder.
fn host_local(node: &Node) -> Value {
    json!({"ipam": {"type": "host-local", "dataDir": node.path("networks")}})
}

/// What the files of host-local say: the address and its container.
fn reserved(node: &Node) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(node.path("networks/k8s-pod-network")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("10.") {
            all.push((name, fs::read_to_string(entry.path()).unwrap()));
        }
    }
    all.sort();
    all
}

fn endpoint(node: &Node, pod: &str) -> Option<Value> {
    let name = WorkloadEndpoint::name_for("one", pod, "eth0");
    node.stored(&Key::namespaced(Kind::WorkloadEndpoint, "n", name))
}

fn text(failed: Result<Value, Value>) -> String {
    failed.expect_err("it fails").to_string()
}

/// The same call of the plugin of the CNI project.
fn other_host_local(node: &Node, command: &str, sandbox: &Sandbox, subnets: &[&str]) -> Result<Value, Value> {
    let ranges: Vec<Value> = subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
    let ipam = json!({"type": "host-local", "dataDir": node.path("networks"), "ranges": ranges});
    let config =
        json!({"cniVersion": "1.0.0", "name": "k8s-pod-network", "type": "host-local", "ipam": ipam});
    node.execute(&sandbox.environment(command), &config)
}

/// The pod CIDR of the Node, the files of the CNI project's host-local, and the endpoint that policy needs.
#[test]
fn host_local_gives_addresses_of_the_pod_cidr() {
    if !can_run(&[Program::CniPlugins]) {
        return;
    }
    let node = Node::new(&json!([]));
    let (a, b, c) = (node.pod("a", json!({})), node.pod("b", json!({})), node.pod("c", json!({})));
    let result = node.call("ADD", &a, host_local(&node)).unwrap();
    assert_eq!(address(&result).to_string(), "10.77.3.2");
    let stored = endpoint(&node, "a").unwrap();
    assert_eq!(stored["spec"]["ipNetworks"], json!(["10.77.3.2/32"]));
    assert_eq!(node.addresses_in_use(), 0, "IPAM has nothing to do with it");
    let shown = crate::node::output_of(&a.netns, "/bin/ip", &["address", "show", "eth0"]);
    assert!(shown.contains("10.77.3.2/32"), "{shown}");

    // Both plugins read and write the same files.
    let others =
        |command: &str, sandbox: &Sandbox| other_host_local(&node, command, sandbox, &["10.77.3.0/29"]);
    assert_eq!(address(&others("ADD", &b).unwrap()).to_string(), "10.77.3.3");
    let ours = node.call("ADD", &c, host_local(&node)).unwrap();
    assert_eq!(address(&ours).to_string(), "10.77.3.4");
    let content = |sandbox: &Sandbox| format!("{}\r\neth0", sandbox.container);
    let expected = [("10.77.3.2", &a), ("10.77.3.3", &b), ("10.77.3.4", &c)];
    let expected = expected.map(|(address, sandbox)| (address.to_owned(), content(sandbox)));
    assert_eq!(reserved(&node), expected);
    others("CHECK", &c).unwrap();
    node.call("DEL", &b, host_local(&node)).unwrap();
    assert_eq!(reserved(&node).len(), 2, "an address of the other plugin is released");

    let after = |result: &Value| {
        let mut config = host_local(&node);
        config["prevResult"] = result.clone();
        config
    };
    node.call("CHECK", &c, after(&ours)).unwrap();
    assert!(text(node.call("CHECK", &c, after(&result))).contains("10.77.3.4"));
    node.call("STATUS", &c, host_local(&node)).unwrap();
    let mut gc = host_local(&node);
    gc["cni.dev/valid-attachments"] = json!([{"containerID": c.container, "ifname": "eth0"}]);
    node.call("GC", &a, gc).unwrap();
    assert_eq!((endpoint(&node, "a"), reserved(&node).len()), (None, 1));
    assert!(endpoint(&node, "c").is_some());
    for _ in 0..2 {
        node.call("DEL", &c, host_local(&node)).unwrap();
    }
    assert_eq!((endpoint(&node, "c"), reserved(&node)), (None, vec![]));
    until("the interface goes", || !c.has_interface("eth0"));
}

/// A pod with an address of each family, which is the files of the CNI project's host-local, too, and in the endpoint.
#[test]
fn host_local_gives_an_address_of_each_family() {
    if !can_run(&[Program::CniPlugins]) {
        return;
    }
    let node = Node::new(&json!([]));
    let (a, b, c) = (node.pod("a", json!({})), node.pod("b", json!({})), node.pod("c", json!({})));
    let mut config = host_local(&node);
    config["ipam"]["ranges"] = json!([[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]);
    let texts = |result: &Value| -> Vec<String> {
        let ips = result["ips"].as_array().unwrap().iter();
        ips.map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned()).collect()
    };
    let result = node.call("ADD", &a, config.clone()).unwrap();
    assert_eq!(texts(&result), ["10.77.3.2", "fd00:77:3::2"]);
    let stored = endpoint(&node, "a").unwrap();
    assert_eq!(stored["spec"]["ipNetworks"], json!(["10.77.3.2/32", "fd00:77:3::2/128"]));
    let shown = crate::node::output_of(&a.netns, "/bin/ip", &["address", "show", "eth0"]);
    assert!(shown.contains("10.77.3.2/32") && shown.contains("fd00:77:3::2/128"), "{shown}");
    for family in ["-4", "-6"] {
        let routes = crate::node::output_of(&a.netns, "/bin/ip", &[family, "route"]);
        assert!(routes.contains("default via"), "{routes}");
    }

    let nets = ["10.77.3.0/29", "fd00:77:3::/64"];
    let theirs = other_host_local(&node, "ADD", &b, &nets).unwrap();
    assert_eq!(texts(&theirs), ["10.77.3.3", "fd00:77:3::3"]);
    let ours = node.call("ADD", &c, config.clone()).unwrap();
    assert_eq!(texts(&ours), ["10.77.3.4", "fd00:77:3::4"]);
    other_host_local(&node, "CHECK", &c, &nets).unwrap();
    other_host_local(&node, "DEL", &c, &nets).unwrap();
    let mut check = config.clone();
    check["prevResult"] = ours;
    assert!(
        text(node.call("CHECK", &c, check)).contains("no address of container"),
        "the other one has released both"
    );
    for sandbox in [&a, &b, &c] {
        node.call("DEL", sandbox, config.clone()).unwrap();
    }
    let left =
        fs::read_dir(node.path("networks/k8s-pod-network")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains(['.', ':'])).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().starts_with("last_reserved_ip.")), "{left:?}");
    until("the endpoint goes", || endpoint(&node, "a").is_none());
}

/// The plugin releases the address although the agent is down; nobody gets it before the pod's endpoint is gone.
#[test]
fn an_address_whose_pod_is_not_gone_is_refused() {
    let mut node = Node::new(&json!([]));
    let (a, b) = (node.pod("a", json!({})), node.pod("b", json!({})));
    let config = |address: &str| {
        let mut config = host_local(&node);
        config["runtimeConfig"] = json!({"ips": [address]});
        config
    };
    let (first, data) = (config("10.77.3.5"), host_local(&node));
    node.call("ADD", &a, first.clone()).unwrap();
    node.kill_agent();
    // The next agent must not find the deletion before the test wants it.
    let mut elsewhere = data.clone();
    elsewhere["deletionQueue"] = json!(node.path("later"));
    node.call("DEL", &a, elsewhere).unwrap();
    assert_eq!(reserved(&node), vec![]);
    node.start_agent();
    until("the agent serves", || node.call("STATUS", &a, json!({})).is_ok());
    let problem = text(node.call("ADD", &b, first.clone()));
    assert!(problem.contains("belongs to pod n/a") && problem.contains("\"code\":11"), "{problem}");
    assert_eq!((reserved(&node), endpoint(&node, "b")), (vec![], None), "the attempt is undone");
    fs::rename(node.path("later"), node.path("queue")).unwrap();
    until("the deletion is carried out", || endpoint(&node, "a").is_none());
    until("the address is free", || node.call("ADD", &b, first.clone()).is_ok());
}

/// The plugin `static` gives every pod what its configuration says.
#[test]
fn an_address_of_another_plugin_is_given_to_one_pod() {
    if !can_run(&[Program::CniPlugins]) {
        return;
    }
    let node = Node::new(&json!([]));
    let (a, b) = (node.pod("a", json!({})), node.pod("b", json!({})));
    let ipam = |address: &str, routes: Value| {
        let dns = json!({"nameservers": ["192.0.2.53"]});
        let addresses = json!([{"address": address}]);
        json!({"cniVersion": "1.0.0", "ipam": {"type": "static", "addresses": addresses, "routes": routes, "dns": dns}})
    };
    let good = ipam("10.78.0.9/24", json!([{"dst": "0.0.0.0/0"}]));
    let result = node.call("ADD", &a, good.clone()).unwrap();
    assert_eq!(address(&result).to_string(), "10.78.0.9");
    assert_eq!(result["dns"]["nameservers"], json!(["192.0.2.53"]));
    assert_eq!(endpoint(&node, "a").unwrap()["spec"]["ipNetworks"], json!(["10.78.0.9/32"]));
    let problem = text(node.call("ADD", &b, good.clone()));
    assert!(problem.contains("10.78.0.9 of ipam.type static belongs to pod n/a"), "{problem}");
    assert!(endpoint(&node, "a").is_some() && endpoint(&node, "b").is_none() && !b.has_interface("eth0"));
    let mut check = good.clone();
    check["prevResult"] = result;
    node.call("CHECK", &a, check).unwrap();
    node.call("DEL", &a, good.clone()).unwrap();
    node.call("ADD", &b, good.clone()).unwrap();
    node.call("DEL", &b, good).unwrap();
    // The kernel deletes links after a burst of deletions.
    until("the pods' links are deleted", || !a.has_interface("eth0") && !b.has_interface("eth0"));

    for (config, expected) in [
        (ipam("10.65.0.9/24", json!([])), "is in IPPool pool"),
        (ipam("fd00::9/64", json!([{"dst": "0.0.0.0/0"}])), "no default route of IPv6"),
        (
            json!({"cniVersion": "1.0.0",
                "ipam": {"type": "static", "addresses": [{"address": "10.78.0.9/24"}, {"address": "10.78.0.8/24"}]}}),
            "gives 2 IPv4 and 0 IPv6 addresses",
        ),
        (ipam("10.78.0.9/24", json!([{"dst": "10.0.0.0/8"}])), "no default route"),
        (ipam("10.78.0.9/24", json!([{"dst": "0.0.0.0/0", "gw": "10.78.0.1"}])), "by 10.78.0.1"),
        (json!({"ipam": {"type": "nobody"}}), "the IPAM plugin nobody (ipam.type) is not in CNI_PATH"),
        (
            json!({"ipam": {"type": "static", "addresses": [{"address": "x"}]}}),
            "the IPAM plugin static failed",
        ),
        (json!({"ipam": {}}), "chooses no addresses"),
    ] {
        let problem = text(node.call("ADD", &a, config));
        assert!(problem.contains(expected), "{expected}: {problem}");
        assert!(!a.has_interface("eth0") && endpoint(&node, "a").is_none());
    }
    for (name, annotation) in
        [("d", "cni.projectcalico.org/ipAddrs"), ("e", "cni.projectcalico.org/ipv4pools")]
    {
        let value = if name == "d" { "[\"10.78.0.9\"]" } else { "[\"pool\"]" };
        let pod = node.pod(name, json!({annotation: value}));
        let problem = text(node.call("ADD", &pod, ipam("10.78.0.9/24", json!([]))));
        assert!(problem.contains(annotation) && problem.contains("ipam.type of network"), "{problem}");
    }
}

/// Every command reaches the plugin, and a failed ADD is undone, whoever failed.
#[test]
fn another_plugin_gets_every_command() {
    let mut node = Node::new(&json!([]));
    let log = node.path("ipam.log");
    let result = json!({"cniVersion": "1.1.0", "ips": [{"address": "10.79.0.9/24"}]});
    let failure = json!({"cniVersion": "1.1.0", "code": 117, "msg": "no lease", "details": "try later"});
    let script = format!(
        "#!/bin/sh\ncat > {input}\necho $CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME >> {log}\n\
         if [ $CNI_COMMAND = ADD ]; then if [ -e {fail} ]; then echo '{failure}'; exit 1; fi; echo '{result}'; fi\n",
        input = node.path("ipam.json").display(),
        log = log.display(),
        fail = node.path("fail").display(),
    );
    let program = node.path("bin/lease");
    testkit::executables::write_script(&program, &script);
    let config = || json!({"ipam": {"type": "lease", "anything": [1]}});
    let pod = node.pod("p", json!({}));
    let called = || {
        let lines = fs::read_to_string(&log).unwrap_or_default();
        let _ = fs::remove_file(&log);
        lines.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let line = |command: &str| format!("{command} container-p eth0");
    let added = node.call("ADD", &pod, config()).unwrap();
    assert_eq!(called(), [line("ADD")]);
    let input: Value = serde_json::from_str(&fs::read_to_string(node.path("ipam.json")).unwrap()).unwrap();
    assert_eq!((&input["ipam"]["anything"], &input["cniVersion"]), (&json!([1]), &json!("1.1.0")));
    let mut check = config();
    check["prevResult"] = added;
    node.call("CHECK", &pod, check).unwrap();
    node.call("STATUS", &pod, config()).unwrap();
    let mut gc = config();
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "container-p", "ifname": "eth0"}]);
    node.call("GC", &pod, gc).unwrap();
    node.call("DEL", &pod, config()).unwrap();
    assert_eq!(called(), ["CHECK", "STATUS", "GC", "DEL"].map(line));

    fs::write(node.path("fail"), "").unwrap();
    let problem = text(node.call("ADD", &pod, config()));
    assert!(
        problem.contains("the IPAM plugin lease failed: no lease") && problem.contains("117"),
        "{problem}"
    );
    assert_eq!(called(), ["ADD", "DEL"].map(line));
    fs::remove_file(node.path("fail")).unwrap();
    node.kill_agent();
    text(node.call("ADD", &pod, config()));
    assert_eq!(called(), ["ADD", "DEL"].map(line));
}
