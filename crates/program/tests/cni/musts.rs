//! What the CNI specification (1.1.0) demands of a plugin that makes the pod's interface. docs/conformance.md lists these
//! tests.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{NewLink, NewLinkKind, RouteSocket};

use crate::node::{Node, Sandbox, address, until};

fn node() -> Node {
    Node::new(&json!([]))
}

/// `prevResult` as a runtime passes it.
fn after(result: &Value) -> Value {
    json!({"prevResult": result})
}

fn code(failed: Result<Value, Value>) -> u64 {
    let error = failed.expect_err("it fails");
    assert!(error["msg"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
    assert!(error["cniVersion"].is_string() && error["details"].is_string(), "{error}");
    error["code"].as_u64().unwrap()
}

fn ip(sandbox: &Sandbox, arguments: &[&str]) {
    let shown = crate::node::output_of(&sandbox.netns, "/bin/ip", arguments);
    assert_eq!(shown, "", "ip {arguments:?}");
}

/// ADD: the result has all interfaces, addresses and routes that the plugin made, in the version of the configuration.
#[test]
fn the_result_of_add_names_what_was_made() {
    let node = node();
    let pod = node.pod("p", json!({}));
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let result = node.execute(&pod.environment("ADD"), &node.config_of(0, version, json!({}))).unwrap();
        assert_eq!(result["cniVersion"], version);
        let [host_end, in_pod] = &result["interfaces"].as_array().unwrap()[..] else { panic!("{result}") };
        let host_name = host_end["name"].as_str().unwrap();
        assert!(node.namespace.run(|| interface_index(host_name).is_ok()).unwrap());
        assert_eq!(
            (host_end["sandbox"].as_str().unwrap_or_default(), &host_end["mac"]),
            ("", &json!("ee:ee:ee:ee:ee:ee"))
        );
        assert_eq!((&in_pod["name"], &in_pod["sandbox"]), (&json!("eth0"), &json!(pod.path)));
        assert_eq!(result["ips"][0]["interface"], 1);
        assert_eq!(result["ips"][0]["version"].as_str(), version.starts_with('0').then_some("4"));
        assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}]));
        let shown = crate::node::output_of(&pod.netns, "/bin/ip", &["address", "show", "eth0"]);
        assert!(
            shown.contains(&address(&result).to_string()) && shown.contains(in_pod["mac"].as_str().unwrap())
        );
    }
    assert_eq!(node.addresses_in_use(), 1, "a repeated ADD changes nothing");
}

/// ADD: an interface of that name that exists is an error, and stays.
#[test]
fn add_fails_if_the_interface_exists() {
    let node = node();
    let pod = node.pod("p", json!({}));
    let make = || {
        let mut socket = RouteSocket::open().unwrap();
        socket.create(&NewLink::new("eth0", NewLinkKind::Bridge)).unwrap();
        interface_index("eth0").unwrap()
    };
    let index = pod.netns.run(make).unwrap();
    assert_eq!(code(node.call("ADD", &pod, json!({}))), 100);
    assert_eq!(pod.netns.run(|| interface_index("eth0").unwrap()).unwrap(), index);
    assert_eq!(node.addresses_in_use(), 0, "nothing of the attempt remains");
}

/// ADD passes the results of earlier plugins on. It fails if one of them has made an interface of the same name.
#[test]
fn add_handles_the_result_of_earlier_plugins() {
    let node = node();
    let pod = node.pod("p", json!({}));
    let earlier = |name: &str, sandbox: Value| {
        after(&json!({
            "cniVersion": "1.1.0", "interfaces": [{"name": name, "sandbox": sandbox}],
            "ips": [{"address": "192.0.2.1/24", "interface": 0}], "dns": {"nameservers": ["192.0.2.53"]},
        }))
    };
    assert_eq!(code(node.call("ADD", &pod, earlier("eth0", json!(pod.path)))), 103);
    assert!(!pod.has_interface("eth0"));
    for wrong in [json!([]), json!({"ips": 1})] {
        assert_eq!(code(node.call("ADD", &pod, after(&wrong))), 6);
    }
    let result = node.call("ADD", &pod, earlier("eth0", json!(""))).unwrap();
    let names: Vec<_> =
        result["interfaces"].as_array().unwrap().iter().map(|each| each["name"].clone()).collect();
    assert_eq!((names.len(), &names[0], &names[2]), (3, &json!("eth0"), &json!("eth0")));
    assert_eq!((&result["ips"][0]["interface"], &result["ips"][1]["interface"]), (&json!(0), &json!(2)));
    assert_eq!(result["dns"]["nameservers"], json!(["192.0.2.53"]));
}

/// DEL: succeeds however often it is called and whatever is missing.
#[test]
fn del_succeeds_whatever_is_missing() {
    let node = node();
    let never = node.pod("never", json!({}));
    node.call("DEL", &never, json!({})).unwrap();
    type Loss = fn(&Node, &Sandbox);
    let losses: [(&str, Loss); 5] = [
        ("nothing", |_, _| {}),
        ("interface", |_, pod| ip(pod, &["link", "delete", "eth0"])),
        ("namespace", |_, pod| NetNs::unbind(&pod.path).unwrap()),
        ("pod", |node, pod| delete(node, Kind::Pod, pod)),
        ("sandbox-variable", |_, _| {}),
    ];
    for (name, lose) in losses {
        let mut pod = node.pod(name, json!({}));
        let result = node.call("ADD", &pod, json!({})).unwrap();
        assert_eq!(node.addresses_in_use(), 1, "{name}");
        lose(&node, &pod);
        if name == "sandbox-variable" {
            pod.path = String::new().into();
        }
        for more in [after(&result), json!({}), json!({})] {
            assert_eq!(node.call("DEL", &pod, more), Ok(Value::Null), "{name}");
        }
        assert_eq!(node.addresses_in_use(), 0, "{name}");
    }
}

fn delete(node: &Node, kind: Kind, pod: &Sandbox) {
    let name = pod.container.strip_prefix("container-").unwrap();
    let key = Key::namespaced(kind, "n", name);
    tokio::runtime::Runtime::new()
        .unwrap()
        .block_on(tortie_store::Store::delete(&*node.store, &key, None))
        .unwrap();
}

/// CHECK: succeeds after ADD, also if a later plugin has added something, and names what is missing.
#[test]
fn check_finds_what_is_missing() {
    let node = node();
    let losses: [(&str, &[&str], Option<u64>); 6] = [
        ("nothing", &["route", "add", "192.0.2.0/24", "dev", "eth0", "scope", "link"], None),
        ("interface", &["link", "delete", "eth0"], Some(102)),
        ("address", &["address", "flush", "dev", "eth0"], Some(102)),
        ("route", &["route", "delete", "default"], Some(102)),
        ("link", &["link", "set", "eth0", "down"], Some(102)),
        ("name", &["link", "set", "eth0", "down", "name", "eth1"], Some(102)),
    ];
    for (name, loss, expected) in losses {
        let pod = node.pod(name, json!({}));
        let result = node.call("ADD", &pod, json!({})).unwrap();
        assert_eq!(node.call("CHECK", &pod, after(&result)), Ok(Value::Null), "{name}");
        ip(&pod, loss);
        let checked = node.call("CHECK", &pod, after(&result));
        match expected {
            None => assert_eq!(checked, Ok(Value::Null)),
            Some(expected) => assert_eq!(code(checked), expected, "{name}"),
        }
        node.call("DEL", &pod, json!({})).unwrap();
        assert!(matches!(code(node.call("CHECK", &pod, after(&result))), 3 | 102), "{name}");
    }
}

/// CHECK: the expected interfaces and addresses are those of the result.
#[test]
fn check_consults_the_result() {
    let node = node();
    let pod = node.pod("p", json!({}));
    let result = node.call("ADD", &pod, json!({})).unwrap();
    assert_eq!(code(node.call("CHECK", &pod, json!({}))), 7, "without a result");
    for (pointer, value) in [("/ips/0/address", json!("10.65.9.9/32")), ("/interfaces/1/name", json!("eth1"))]
    {
        let mut other = result.clone();
        *other.pointer_mut(pointer).unwrap() = value;
        assert_eq!(code(node.call("CHECK", &pod, after(&other))), 102, "{pointer}");
    }
    node.call("CHECK", &pod, after(&result)).unwrap();
}

/// GC: what no valid attachment names is removed, and the rest stays.
#[test]
fn gc_removes_what_is_not_valid() {
    let node = node();
    let pods = ["kept", "lost"].map(|name| node.pod(name, json!({})));
    for pod in &pods {
        node.call("ADD", pod, json!({})).unwrap();
    }
    let [kept, lost] = &pods;
    let valid = json!({"cni.dev/valid-attachments": [{"containerID": kept.container, "ifname": "eth0"}]});
    let config = node.config_of(0, "1.1.0", valid);
    for _ in 0..2 {
        assert_eq!(node.execute(&[("CNI_COMMAND", "GC")], &config), Ok(Value::Null));
        until("the interface goes", || !lost.has_interface("eth0"));
        assert!(kept.has_interface("eth0") && node.addresses_in_use() == 1);
    }
    assert_eq!(code(node.execute(&[("CNI_COMMAND", "GC")], &node.config_of(0, "1.1.0", json!({})))), 7);
    assert!(kept.has_interface("eth0"));
    let none = json!({"cni.dev/valid-attachments": null});
    node.execute(&[("CNI_COMMAND", "GC")], &node.config_of(0, "1.1.0", none)).unwrap();
    assert_eq!(node.addresses_in_use(), 0);
}

/// STATUS: success if ADD can succeed, and otherwise code 50. ADD fails with "try again later"; DEL is kept.
#[test]
fn status_says_whether_add_can_succeed() {
    let mut node = node();
    let status =
        |node: &Node| node.execute(&[("CNI_COMMAND", "STATUS")], &node.config_of(0, "1.1.0", json!({})));
    assert_eq!(status(&node), Ok(Value::Null));
    let pods = ["early", "late"].map(|name| node.pod(name, json!({})));
    let [early, late] = &pods;
    node.call("ADD", early, json!({})).unwrap();
    node.kill_agent();
    assert_eq!(code(status(&node)), 50);
    assert_eq!(code(node.call("ADD", late, json!({}))), 11);
    assert_eq!(node.call("DEL", early, json!({})), Ok(Value::Null));
    node.start_agent();
    until("the kept DEL is carried out", || node.addresses_in_use() == 0 && !early.has_interface("eth0"));
    until("the agent serves", || status(&node).is_ok());
    node.call("ADD", late, json!({})).unwrap();
}

/// Every call: parameters that are missing or invalid give an error document with the specification's code.
#[test]
fn invalid_parameters_are_errors() {
    let node = node();
    let pod = node.pod("p", json!({}));
    let config = node.config_of(0, "1.0.0", json!({}));
    for command in ["ADD", "DEL", "CHECK"] {
        for missing in ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS"] {
            let environment: Vec<_> =
                pod.environment(command).into_iter().filter(|(name, _)| *name != missing).collect();
            // DEL needs no namespace.
            if (command, missing) != ("DEL", "CNI_NETNS") {
                assert_eq!(code(node.execute(&environment, &config)), 4, "{command} without {missing}");
            }
        }
    }
    for (name, value) in
        [("CNI_COMMAND", "MOVE"), ("CNI_CONTAINERID", "-x"), ("CNI_IFNAME", "a:b"), ("CNI_NETNS", "/nowhere")]
    {
        let mut environment = pod.environment("ADD");
        environment.retain(|(other, _)| *other != name);
        environment.push((name, value));
        let expected = if name == "CNI_NETNS" { 100 } else { 4 };
        assert_eq!(code(node.execute(&environment, &config)), expected, "{name}={value}");
    }
    for (change, expected) in [
        (json!({"cniVersion": "2.0.0"}), 1),
        (json!({"name": ""}), 7),
        (json!({"ipam": {"type": "nobody"}}), 4),
    ] {
        assert_eq!(
            code(node.execute(&pod.environment("ADD"), &node.config_of(0, "1.0.0", change.clone()))),
            expected,
            "{change}"
        );
    }
    assert!(!pod.has_interface("eth0") && node.addresses_in_use() == 0);
}

/// VERSION: needs nothing but the command.
#[test]
fn version_lists_what_is_supported() {
    let node = node();
    let answer = node
        .execute(&[("CNI_COMMAND", "VERSION")], &json!({"type": "tortie-cni", "cniVersion": "1.0.0"}))
        .unwrap();
    assert_eq!(answer["cniVersion"], "1.0.0");
    assert_eq!(answer["supportedVersions"], json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]));
}

/// Each interface of a container is an attachment of its own.
#[test]
fn the_interfaces_of_a_container_are_separate_attachments() {
    let node = node();
    let first = node.pod("p", json!({}));
    let second = first.with_interface("net1");
    let results = [&first, &second].map(|attachment| node.call("ADD", attachment, json!({})).unwrap());
    assert_ne!(address(&results[0]), address(&results[1]));
    node.call("CHECK", &second, after(&results[1])).unwrap();
    node.call("DEL", &second, json!({})).unwrap();
    until("the interface goes", || !first.has_interface("net1"));
    node.call("CHECK", &first, after(&results[0])).unwrap();
}

/// A runtime may add a container again, in the same namespace, as soon as its DEL has succeeded.
#[test]
fn add_succeeds_right_after_del() {
    let node = node();
    let pod = node.pod("p", json!({}));
    for _ in 0..5 {
        let result = node.call("ADD", &pod, json!({})).unwrap();
        node.call("CHECK", &pod, after(&result)).unwrap();
        node.call("DEL", &pod, json!({})).unwrap();
    }
}

/// Containers may be operated on concurrently: each gets an address of its own, and DEL releases all of them.
#[test]
fn containers_are_added_and_deleted_concurrently() {
    let node = node();
    let pods: Vec<_> = (0..10).map(|number| node.pod(&format!("p{number}"), json!({}))).collect();
    let added = std::thread::scope(|scope| {
        let threads: Vec<_> =
            pods.iter().map(|pod| scope.spawn(|| node.call("ADD", pod, json!({})))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let addresses: BTreeSet<_> = added.iter().map(|result| address(result.as_ref().unwrap())).collect();
    assert_eq!((addresses.len(), node.addresses_in_use()), (10, 10));
    std::thread::scope(|scope| {
        for pod in &pods {
            scope.spawn(|| assert_eq!(node.call("DEL", pod, json!({})), Ok(Value::Null)));
        }
    });
    assert_eq!(node.addresses_in_use(), 0);
    until("the interfaces go", || pods.iter().all(|pod| !pod.has_interface("eth0")));
}
