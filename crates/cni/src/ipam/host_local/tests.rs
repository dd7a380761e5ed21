//! host-local, against a model, and against files that the other plugin would write.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::thread;

use tempfile::TempDir;

use super::*;
use crate::Command;

fn call(folder: &TempDir, container: &str, ipam: Value) -> Invocation {
    let mut section = json!({"type": "host-local", "dataDir": folder.path()});
    for (name, value) in ipam.as_object().unwrap() {
        section[name] = value.clone();
    }
    Invocation {
        command: Command::Add,
        container_id: container.to_owned(),
        netns: "/run/netns/x".to_owned(),
        interface: "eth0".to_owned(),
        args: BTreeMap::new(),
        config: serde_json::from_value(json!({"cniVersion": "1.0.0", "name": "net", "ipam": section}))
            .unwrap(),
        delegated: Vec::new(),
    }
}

fn pod_cidrs() -> Result<Vec<IpNet>, Failure> {
    Ok(["10.9.0.0/29", "fd00:9::/64"].map(|net| net.parse().unwrap()).to_vec())
}

fn added(call: &Invocation) -> Result<String, String> {
    let texts = |nets: Vec<IpNet>| nets.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    add(call, &pod_cidrs).map(|result| texts(result.addresses)).map_err(|failure| failure.to_string())
}

/// The gateway, the network and the broadcast address are left out; freed addresses are used again last.
#[test]
fn addresses_go_round() {
    let folder = tempfile::tempdir().unwrap();
    let next = |container: &str| added(&call(&folder, container, json!({})));
    for (container, expected) in [("a", "10.9.0.2/29"), ("b", "10.9.0.3/29"), ("a", "10.9.0.2/29")] {
        assert_eq!(next(container), Ok(expected.to_owned()));
    }
    del(&call(&folder, "a", json!({}))).unwrap();
    for (container, expected) in [("c", "4"), ("d", "5"), ("e", "6"), ("f", "2")] {
        assert_eq!(next(container), Ok(format!("10.9.0.{expected}/29")));
    }
    let problem = next("g").unwrap_err();
    assert!(problem.contains("10.9.0.1 to 10.9.0.6 are in use"), "{problem}");
    assert_eq!(status(&call(&folder, "", json!({})), &pod_cidrs).unwrap_err().code, Code::NOT_AVAILABLE);
    del(&call(&folder, "e", json!({}))).unwrap();
    status(&call(&folder, "", json!({})), &pod_cidrs).unwrap();
    assert_eq!(next("g"), Ok("10.9.0.6/29".to_owned()));
}

/// On a node that moves from flannel, pods of DaemonSets may still have addresses of the same range.
#[test]
fn an_address_of_another_network_is_not_given() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("cbr0");
    fs::create_dir(&other).unwrap();
    for address in ["10.9.0.2", "10.9.0.4", "10.9.0.5", "10.9.0.6"] {
        fs::write(other.join(address), "of flannel\r\neth0").unwrap();
    }
    let ask = |container: &str| call(&folder, container, json!({}));
    assert_eq!(added(&ask("a")), Ok("10.9.0.3/29".to_owned()));
    let full = added(&ask("b")).unwrap_err();
    assert!(full.contains("are in use") && full.contains("cbr0); remove such a folder"), "{full}");
    assert_eq!(status(&ask("b"), &pod_cidrs).unwrap_err().code, Code::NOT_AVAILABLE);
    let mut wanted = ask("b");
    wanted.args.insert("IP".to_owned(), "10.9.0.4".to_owned());
    assert!(added(&wanted).unwrap_err().contains("another network"));
    // What flannel's plugin frees, and what a pod has already.
    fs::remove_file(other.join("10.9.0.4")).unwrap();
    assert_eq!(added(&wanted), Ok("10.9.0.4/29".to_owned()));
    fs::write(other.join("10.9.0.4"), "").unwrap();
    assert_eq!(added(&wanted), Ok("10.9.0.4/29".to_owned()));
}

/// A pod gets one address of each set, by Calico's names of the node's networks, and each family goes round by itself.
#[test]
fn a_pod_has_an_address_of_each_family() {
    let folder = tempfile::tempdir().unwrap();
    let both = || json!({"ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]});
    let next = |container: &str| added(&call(&folder, container, both()));
    for (container, expected) in [
        ("a", "10.9.0.2/29 fd00:9::2/64"),
        ("b", "10.9.0.3/29 fd00:9::3/64"),
        ("a", "10.9.0.2/29 fd00:9::2/64"),
    ] {
        assert_eq!(next(container), Ok(expected.to_owned()));
    }
    let only_v6 = tempfile::tempdir().unwrap();
    let v6 = |container: &str| call(&only_v6, container, json!({"subnet": "usePodCidrIPv6"}));
    assert_eq!(added(&v6("c")), Ok("fd00:9::2/64".to_owned()));
    let mut checked = call(&folder, "a", both());
    check(&checked).unwrap();
    let before = |second: &str| json!({"ips": [{"address": "10.9.0.2/29"}, {"address": second}]});
    for (second, differs) in [("fd00:9::2/64", false), ("fd00:9::3/64", true)] {
        checked.config.extra.insert("prevResult".to_owned(), before(second));
        assert_eq!(check(&checked).is_err(), differs, "{second}");
    }
    // Somebody has removed the reservation of one family.
    let whole = json!({"interfaces": [{"name": "eth0", "sandbox": "/x"}],
        "ips": [{"address": "10.9.0.2/29", "interface": 0}, {"address": "fd00:9::2/64", "interface": 0}]});
    checked.config.extra.insert("prevResult".to_owned(), whole);
    check(&checked).unwrap();
    fs::remove_file(folder.path().join("net/fd00:9::2")).unwrap();
    assert_eq!(check(&checked).unwrap_err().code, Code::DIFFERS);
    del(&call(&folder, "a", both())).unwrap();
    let left = |name: &str| folder.path().join("net").join(name).exists();
    assert!(!left("10.9.0.2") && !left("fd00:9::2") && left("fd00:9::3"));
    // The last free IPv4 addresses, and then none: the pod keeps no IPv6 address either.
    for (container, expected) in [("d", "4"), ("e", "5"), ("f", "6"), ("g", "2")] {
        assert!(next(container).unwrap().starts_with(&format!("10.9.0.{expected}/29 ")), "{container}");
    }
    assert_eq!(status(&call(&folder, "", both()), &pod_cidrs).unwrap_err().code, Code::NOT_AVAILABLE);
    status(&v6(""), &pod_cidrs).unwrap();
    // Both families are requested, or one of them.
    del(&call(&folder, "d", both())).unwrap();
    let with = |ips: Value| {
        let mut call = call(&folder, "h", both());
        call.config.extra.insert("runtimeConfig".to_owned(), json!({"ips": ips}));
        call
    };
    assert!(added(&with(json!(["fd00:9::99", "fd00:9::98"]))).unwrap_err().contains("several IPv6"));
    assert!(added(&with(json!(["fd01::1"]))).unwrap_err().contains("in no range"));
    assert_eq!(added(&with(json!(["fd00:9::99"]))), Ok("10.9.0.4/29 fd00:9::99/64".to_owned()));
    let lacking = || Ok(vec!["10.9.0.0/29".parse().unwrap()]);
    let problem = add(&call(&folder, "i", both()), &lacking).unwrap_err().to_string();
    assert!(problem.contains("has no IPv6 network"), "{problem}");
}

/// The search begins behind the last address and ends with it, over all ranges.
#[test]
fn every_address_is_tried_once() {
    let address = |last: u8| IpAddr::from(Ipv4Addr::new(10, 0, 0, last));
    let range = |first: u8, last: u8| Range {
        subnet: "10.0.0.0/24".parse().unwrap(),
        first: address(first),
        last: address(last),
        gateway: address(21),
    };
    let ranges = [range(10, 12), range(20, 22), range(30, 30)];
    for (last, expected) in [
        (None, vec![10, 11, 12, 20, 22, 30]),
        (Some(11), vec![12, 20, 22, 30, 10, 11]),
        (Some(20), vec![22, 30, 10, 11, 12, 20]),
        (Some(30), vec![10, 11, 12, 20, 22, 30]),
        (Some(99), vec![10, 11, 12, 20, 22, 30]),
    ] {
        let found: Vec<IpAddr> = after(&ranges, last.map(address)).collect();
        let expected: Vec<IpAddr> = expected.into_iter().map(address).collect();
        assert_eq!(found, expected, "{last:?}");
    }
}

#[test]
fn a_requested_address_is_given_once() {
    let folder = tempfile::tempdir().unwrap();
    let with = |container: &str, name: &str, value: Value| {
        let mut call = call(&folder, container, json!({"subnet": "10.1.0.0/24"}));
        call.config.extra.insert(name.to_owned(), value);
        call
    };
    let ips = |address: &str| json!({"ips": [address]});
    assert_eq!(added(&with("a", "runtimeConfig", ips("10.1.0.9/24"))), Ok("10.1.0.9/24".to_owned()));
    assert!(
        added(&with("b", "args", json!({"cni": ips("10.1.0.9")}))).unwrap_err().contains("another container")
    );
    for wrong in ["10.1.0.1", "10.1.0.255", "10.2.0.1"] {
        let problem = added(&with("b", "runtimeConfig", ips(wrong))).unwrap_err();
        assert!(problem.contains("in no range"), "{wrong}: {problem}");
    }
    assert!(
        added(&with("a", "runtimeConfig", ips("10.1.0.10"))).unwrap_err().contains("asks for another one")
    );
    assert!(added(&with("b", "runtimeConfig", json!({"ips": ["10.1.0.7", "10.1.0.8"]}))).is_err());
    assert!(added(&with("b", "runtimeConfig", ips("x"))).is_err());
    let mut by_args = call(&folder, "b", json!({"subnet": "10.1.0.0/24"}));
    by_args.args.insert("IP".to_owned(), "10.1.0.11".to_owned());
    assert_eq!(added(&by_args), Ok("10.1.0.11/24".to_owned()));
}

#[test]
fn configurations_that_cannot_work_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    for (ipam, expected) in [
        (json!({"subnet": "10.0.0.0/31"}), "no addresses for pods"),
        (json!({"subnet": "10.0.0.1/24"}), "bits after its prefix"),
        (json!({"subnet": "10.0.0.0/24", "rangeStart": "10.0.1.1"}), "cannot be from"),
        (
            json!({"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.8"}),
            "cannot be from",
        ),
        (json!({"subnet": "fd00::/127"}), "no addresses for pods"),
        (json!({"subnet": "fd00::/64", "rangeStart": "10.0.0.9"}), "cannot be from"),
        (json!({"subnet": "x"}), "no network"),
        (json!({"subnet": "10.0.0.0/24", "ranges": [[{"subnet": "10.1.0.0/24"}]]}), "several sets of IPv4"),
        (json!({"ranges": [[{"subnet": "fd01::/64"}], [{"subnet": "fd00::/64"}]]}), "several sets of IPv6"),
        (json!({"ranges": [[{"subnet": "10.0.0.0/24"}, {"subnet": "fd00::/64"}]]}), "both families"),
        (json!({"ranges": [[{"subnet": "10.0.0.0/24"}, {"subnet": "10.0.0.0/25"}]]}), "overlap"),
        (json!({"ranges": [[]]}), "empty set"),
        (json!({"subnets": "10.0.0.0/24"}), "subnets"),
        (json!({"routes": [{"dst": "10.0.0.0/8"}]}), "no default route"),
        (
            json!({"ranges": [[{}], [{"subnet": "usePodCidrIPv6"}]], "routes": [{"dst": "0.0.0.0/0"}]}),
            "route of IPv6",
        ),
        (json!({"resolvConf": "/dev/null/x"}), "/dev/null/x"),
    ] {
        let problem = added(&call(&folder, "c", ipam.clone())).unwrap_err();
        assert!(problem.contains(expected), "{ipam}: {problem}");
    }
    let nothing_left = || fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(nothing_left(), 0, "nothing is reserved");
    for name in ["a/b", ".."] {
        let mut call = call(&folder, "c", json!({}));
        call.config.name = name.to_owned();
        assert!(added(&call).unwrap_err().contains("no file name"), "{name}");
    }
}

#[test]
fn garbage_is_what_the_runtime_does_not_know() {
    let folder = tempfile::tempdir().unwrap();
    for container in ["a", "b"] {
        added(&call(&folder, container, json!({}))).unwrap();
    }
    let net = folder.path().join("net");
    // Of an older host-local, and of one that crashed between making the file and writing it.
    fs::write(net.join("10.9.0.4"), "old").unwrap();
    fs::write(net.join("10.9.0.5"), "").unwrap();
    fs::write(net.join("10.9.0.6"), "gone").unwrap();
    let mut gc = call(&folder, "", json!({}));
    let attachment = |id: &str| Attachment { container_id: id.to_owned(), ifname: "eth0".to_owned() };
    gc.config.valid_attachments = Some(vec![attachment("a"), attachment("old")]);
    collect_garbage(&gc).unwrap();
    let store = Config::of(&gc).unwrap().store("net").unwrap();
    let mut left: Vec<String> =
        store.all().unwrap().into_iter().map(|(address, _)| address.to_string()).collect();
    left.sort();
    assert_eq!(left, ["10.9.0.2", "10.9.0.4"]);
    drop(store);
    let mut checked = call(&folder, "a", json!({}));
    check(&checked).unwrap();
    checked.config.extra.insert("prevResult".to_owned(), json!({"ips": [{"address": "10.9.0.3/29"}]}));
    assert_eq!(check(&checked).unwrap_err().code, Code::DIFFERS);
    assert_eq!(check(&call(&folder, "b", json!({}))).unwrap_err().code, Code::DIFFERS);
}

/// Many processes at once: threads with a lock of their own each.
#[test]
fn no_address_is_given_twice_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let one = |container: String| {
        let call = call(&folder, &container, json!({"subnet": "10.1.0.0/24"}));
        for _ in 0..3 {
            added(&call).unwrap();
            del(&call).unwrap();
        }
        added(&call).unwrap()
    };
    let mut all: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> = (0..16).map(|number| scope.spawn(move || one(format!("c{number}")))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 16);
}
