//! CNI on an agent, with what is stored and what is connected.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::common::{Bed, NODE, condition, endpoint_id, endpoint_key, pod_key, send, until};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_cni::transport::{self, Answer};
use tortie_cni::{Code, Command, Invocation};
use tortie_dataplane::{Reason, Report};
use tortie_ipam::{Ipam, Request};

/// The code of a failed call.
fn code(answer: Answer) -> Code {
    answer.expect_err("it fails").code
}

/// A pod's network differs between operating systems: a host route on Linux, the block on Windows.
#[tokio::test(flavor = "multi_thread")]
async fn the_answer_has_the_network_of_the_wiring() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    for (prefix_len, gateway) in [(32, [169, 254, 1, 1]), (26, [10, 0, 0, 1])] {
        bed.os.lock().pod_network = Some((prefix_len, gateway.into()));
        let success = bed.call(bed.invocation(Command::Add, "c", "p")).await.unwrap().unwrap();
        assert!(success.ips[0].address.ends_with(&format!("/{prefix_len}")), "{success:?}");
        assert_eq!(success.routes[0].gw, Some(gateway.into()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_added_checked_and_deleted() {
    let bed = Bed::new().await;
    bed.pod("p", "u1", json!({"app": "a"})).await;
    let success = bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap().unwrap();
    let endpoint = bed.endpoint("p", "eth0").await.unwrap();
    let labels =
        json!({"app": "a", "projectcalico.org/namespace": "n", "projectcalico.org/orchestrator": "k8s"});
    assert_eq!(endpoint["metadata"]["labels"], labels);
    assert_eq!(endpoint["metadata"]["annotations"], json!({"tortie.io/pod-uid": "u1"}));
    assert_eq!(endpoint["spec"]["ipNetworks"], json!([success.ips[0].address]));
    assert!(
        bed.os.lock().state.endpoints.contains_key(&endpoint_id("p")),
        "policy was in force before the answer"
    );

    bed.call(bed.invocation(Command::Check, "c1", "p")).await.unwrap();
    assert_eq!(code(bed.call(bed.invocation(Command::Check, "c2", "p")).await), Code::DIFFERS);
    assert_eq!(code(bed.call(bed.invocation(Command::Check, "c1", "q")).await), Code::UNKNOWN_CONTAINER);
    bed.os.lock().connected.clear();
    assert_eq!(code(bed.call(bed.invocation(Command::Check, "c1", "p")).await), Code::DIFFERS);

    for _ in 0..2 {
        bed.call(bed.invocation(Command::Del, "c1", "p")).await.unwrap();
        assert_eq!(bed.endpoint("p", "eth0").await, None);
        assert!(bed.store.list(Kind::IpamHandle).await.unwrap().items.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gc_removes_pods_that_the_runtime_does_not_know() {
    let bed = Bed::new().await;
    for (pod, container) in [("kept", "c1"), ("lost", "c2")] {
        bed.pod(pod, pod, json!({})).await;
        bed.call(bed.invocation(Command::Add, container, pod)).await.unwrap();
    }
    let mut gc = bed.invocation(Command::Gc, "", "");
    (gc.args, gc.interface) = (BTreeMap::new(), String::new());
    assert_eq!(code(bed.call(gc.clone()).await), Code::INVALID_CONFIG);
    gc.config.valid_attachments =
        serde_json::from_value(json!([{"containerID": "c1", "ifname": "eth0"}])).unwrap();
    bed.call(gc).await.unwrap();
    assert_eq!(bed.endpoint("lost", "eth0").await, None);
    assert!(bed.endpoint("kept", "eth0").await.is_some());
    assert_eq!(bed.os.lock().connected, BTreeMap::from([(endpoint_id("kept"), "c1".to_owned())]));
}

/// A policy that is not in force is a difference, whatever the interface.
#[tokio::test(flavor = "multi_thread")]
async fn check_demands_that_policy_is_in_force() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    let check = async || bed.call(bed.invocation(Command::Check, "c1", "p")).await;
    let failing = [condition(Reason::PolicyNotInForce)];
    for report in [
        Report { endpoints: [(endpoint_id("p"), failing.to_vec())].into(), retry: true, ..Report::default() },
        Report { node: failing.to_vec(), retry: true, ..Report::default() },
    ] {
        bed.os.lock().report = report;
        (bed.os.lock().disturbed.as_ref().expect("the agent wants to know"))();
        until("CHECK finds it", || async {
            check().await.is_err_and(|failure| {
                failure.code == Code::DIFFERS
                    && failure.msg.contains("its policy is not in force: the test says")
            })
        })
        .await;
        bed.os.lock().report = Report::default();
        until("policy is in force again", || async { check().await.is_ok() }).await;
    }
}

/// A DEL that comes while the ADD of the same container is under way waits for it, and removes everything.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_during_the_add_of_the_container_leaves_nothing() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    bed.os.lock().report = Report {
        endpoints: [(endpoint_id("p"), vec![condition(Reason::InterfaceMissing)])].into(),
        retry: true,
        ..Report::default()
    };
    let add = bed.call(bed.invocation(Command::Add, "c1", "p"));
    let del = async {
        until("the endpoint is published", || async { bed.endpoint("p", "eth0").await.is_some() }).await;
        let del = bed.call(bed.invocation(Command::Del, "c1", "p"));
        let open = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            bed.os.lock().report = Report::default();
        };
        tokio::join!(del, open).0
    };
    let (added, deleted) = tokio::join!(add, del);
    deleted.unwrap();
    // Whether the ADD was answered before does not matter.
    drop(added);
    assert_eq!(bed.endpoint("p", "eth0").await, None);
    assert!(bed.os.lock().connected.is_empty());
    assert!(bed.store.list(Kind::IpamHandle).await.unwrap().items.is_empty());
}

/// The interfaces of one container have addresses of their own.
#[tokio::test(flavor = "multi_thread")]
async fn two_interfaces_of_a_container_have_two_addresses() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let call = |command, interface: &str| Invocation {
        interface: interface.to_owned(),
        ..bed.invocation(command, "c1", "p")
    };
    let address = |answer: Answer| answer.unwrap().unwrap().ips[0].address.clone();
    let first = address(bed.call(call(Command::Add, "eth0")).await);
    let second = address(bed.call(call(Command::Add, "net1")).await);
    assert_ne!(first, second);
    bed.call(call(Command::Del, "net1")).await.unwrap();
    let handles = bed.store.list(Kind::IpamHandle).await.unwrap().items;
    let handles: Vec<&str> = handles.iter().map(|handle| handle.key.name.as_str()).collect();
    assert_eq!(handles, ["net.c1"], "the form that Calico knows");
    bed.pod("q", "v", json!({})).await;
    let other = address(bed.call(bed.invocation(Command::Add, "c2", "q")).await);
    assert_ne!(other, first, "eth0 still has it");
    bed.call(call(Command::Del, "eth0")).await.unwrap();
}

/// Addresses remain if an endpoint was deleted by hand, or if a node crashed in the middle of an ADD.
#[tokio::test(flavor = "multi_thread")]
async fn gc_releases_addresses_without_endpoint() {
    let bed = Bed::new().await;
    for (pod, container, interface) in
        [("a", "c1", "eth0"), ("b", "c2", "eth0"), ("b", "c2", "net1"), ("c", "c3", "eth0")]
    {
        if interface == "eth0" {
            bed.pod(pod, pod, json!({})).await;
        }
        let call =
            Invocation { interface: interface.to_owned(), ..bed.invocation(Command::Add, container, pod) };
        bed.call(call).await.unwrap();
        // All but c lose their endpoints; the runtime knows a and c.
        if pod != "c" {
            bed.store.delete(&endpoint_key(pod, interface), None).await.unwrap();
        }
    }
    // A record that is lost does not keep its address.
    bed.store.delete(&Key::global(Kind::IpamHandle, "net.c2"), None).await.unwrap();
    // Another network whose name begins with this one's, and of which this GC knows nothing.
    bed.pod("d", "d", json!({})).await;
    let mut other = bed.invocation(Command::Add, "c4", "d");
    other.config.name = "net.x".to_owned();
    bed.call(other).await.unwrap();
    let mut gc = bed.invocation(Command::Gc, "", "");
    (gc.args, gc.interface) = (BTreeMap::new(), String::new());
    let known = json!([{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c3", "ifname": "eth0"}]);
    gc.config.valid_attachments = serde_json::from_value(known).unwrap();
    bed.call(gc).await.unwrap();
    let handles = bed.store.list(Kind::IpamHandle).await.unwrap().items;
    let handles: Vec<&str> = handles.iter().map(|handle| handle.key.name.as_str()).collect();
    assert_eq!(handles, ["net.c1", "net.c3", "net.x.c4"]);
    assert_eq!(bed.store.list(Kind::IpamBlock).await.unwrap().items.len(), 1);
    assert_eq!(bed.allocated().await.len(), 3);
}

/// A record may be lost, for instance by a repair at the wrong moment.
#[tokio::test(flavor = "multi_thread")]
async fn del_releases_an_address_whose_handle_has_no_record() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    bed.store.delete(&Key::global(Kind::IpamHandle, "net.c1"), None).await.unwrap();
    // The DEL of another container does not release it.
    bed.call(bed.invocation(Command::Del, "c2", "p")).await.unwrap();
    assert_eq!(bed.allocated().await.len(), 1);
    bed.call(bed.invocation(Command::Del, "c1", "p")).await.unwrap();
    assert_eq!(bed.allocated().await, [""; 0]);
}

/// The sandbox of a static pod has the uid of its manifest, which its mirror in the API names in an annotation.
#[tokio::test(flavor = "multi_thread")]
async fn a_static_pod_is_known_by_the_hash_of_its_manifest() {
    let bed = Bed::new().await;
    let value = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "mirror", "annotations": {"kubernetes.io/config.hash": "static"}},
        "spec": {"nodeName": NODE, "containers": []},
    });
    bed.store.create(&pod_key("p"), value).await.unwrap();
    let with_uid = |uid: &str| {
        let mut call = bed.invocation(Command::Add, "c1", "p");
        call.args.insert("K8S_POD_UID".to_owned(), uid.to_owned());
        call
    };
    assert_eq!(code(bed.call(with_uid("another")).await), Code::TRY_AGAIN_LATER);
    bed.call(with_uid("static")).await.unwrap();
}

/// The agent was down only for a moment, and nothing restarts it.
#[tokio::test(flavor = "multi_thread")]
async fn deletions_on_disk_are_carried_out_while_the_agent_runs() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    let queue = bed.dir.path().join("queue");
    fs::create_dir_all(&queue).unwrap();
    fs::write(queue.join("bad.json"), "{").unwrap();
    let call = serde_json::to_vec(&bed.invocation(Command::Del, "c1", "p")).unwrap();
    fs::write(queue.join("c1-eth0.json"), call).unwrap();
    until("the deletion is carried out", || async {
        bed.endpoint("p", "eth0").await.is_none() && !queue.join("c1-eth0.json").exists()
    })
    .await;
    until("what cannot be read is put aside", || async { queue.join("bad.unreadable").exists() }).await;
}

/// Pods may be relabelled at any moment, also between the agent's read of the Pod and its write of the endpoint.
#[tokio::test(flavor = "multi_thread")]
async fn a_relabel_during_add_is_not_lost_on_any_interface() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({"app": "old"})).await;
    for (interface, container) in [("eth0", "c1"), ("net1", "c2")] {
        bed.pod("p", "u", json!({"app": "old"})).await;
        let mut add = bed.invocation(Command::Add, container, "p");
        add.interface = interface.to_owned();
        let open = bed.os.hold(container);
        let (added, ()) = tokio::join!(bed.call(add), async {
            until("the pod is being connected", || async { bed.os.is_held(container) }).await;
            bed.pod("p", "u", json!({"app": "new"})).await;
            drop(open);
        });
        added.unwrap();
        until("the endpoint has the pod's labels", || async {
            bed.endpoint("p", interface).await.unwrap()["metadata"]["labels"]["app"] == "new"
        })
        .await;
    }
    bed.pod("p", "u", json!({"app": "newest"})).await;
    until("both endpoints have the pod's labels", || async {
        let mut all = Vec::new();
        for interface in ["eth0", "net1"] {
            all.push(bed.endpoint("p", interface).await.unwrap()["metadata"]["labels"]["app"].clone());
        }
        all == ["newest", "newest"]
    })
    .await;
}

/// The controllers copy the labels of pods that they copy from the Kubernetes API.
#[tokio::test(flavor = "multi_thread")]
async fn the_labels_of_a_copied_pod_are_left_to_the_controllers() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({"app": "old"})).await;
    bed.pod("other", "u", json!({"app": "old"})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    bed.call(bed.invocation(Command::Add, "c2", "other")).await.unwrap();
    let stored = bed.store.get(&pod_key("p")).await.unwrap().unwrap();
    let mut copied = stored.value.clone();
    copied["metadata"]["annotations"] = json!({tortie_store::COPIED_FROM: "pods/n/p"});
    copied["metadata"]["labels"] = json!({"app": "new"});
    bed.store.update(&pod_key("p"), copied, &stored.version).await.unwrap();
    // When the later change has been processed, the earlier one has, too.
    bed.pod("other", "u", json!({"app": "new"})).await;
    until("a pod is followed", || async {
        bed.endpoint("other", "eth0").await.unwrap()["metadata"]["labels"]["app"] == "new"
    })
    .await;
    assert_eq!(bed.endpoint("p", "eth0").await.unwrap()["metadata"]["labels"]["app"], "old");
}

/// A StatefulSet recreates pods with the same name.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_the_same_name_is_another_pod() {
    let bed = Bed::new().await;
    bed.pod("p", "u1", json!({"app": "one"})).await;
    bed.pod("other", "u", json!({"app": "old"})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    bed.call(bed.invocation(Command::Add, "c2", "other")).await.unwrap();
    bed.store.delete(&pod_key("p"), None).await.unwrap();
    bed.pod("p", "u2", json!({"app": "two"})).await;
    // When the later change has been processed, the earlier one has, too.
    bed.pod("other", "u", json!({"app": "new"})).await;
    until("a pod is followed", || async {
        bed.endpoint("other", "eth0").await.unwrap()["metadata"]["labels"]["app"] == "new"
    })
    .await;
    assert_eq!(bed.endpoint("p", "eth0").await.unwrap()["metadata"]["labels"]["app"], "one");

    let mut add = bed.invocation(Command::Add, "c3", "p");
    add.args.insert("K8S_POD_UID".to_owned(), "u1".to_owned());
    let failure = bed.call(add.clone()).await.unwrap_err();
    assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
    assert!(failure.to_string().contains("u1") && failure.to_string().contains("u2"), "{failure}");
    add.args.insert("K8S_POD_UID".to_owned(), "u2".to_owned());
    bed.call(add).await.unwrap();
    assert_eq!(bed.endpoint("p", "eth0").await.unwrap()["metadata"]["labels"]["app"], "two");
}

/// The kubelet gives up on a sandbox and creates another one while the ADD of the first continues.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_add_does_not_replace_a_newer_sandbox() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let container =
        || async { bed.endpoint("p", "eth0").await.unwrap_or_default()["spec"]["containerID"].clone() };
    let open = bed.os.hold("old");
    let socket = bed.dir.path().join("agent.sock");
    let (old, new) = (bed.invocation(Command::Add, "old", "p"), bed.invocation(Command::Add, "new", "p"));
    let first = tokio::task::spawn_blocking({
        let (socket, old) = (socket.clone(), old.clone());
        move || send(&socket, &old)
    });
    until("the old sandbox is being connected", || async { bed.os.is_held("old") }).await;
    let second = tokio::task::spawn_blocking(move || send(&socket, &new));
    // A call whose plugin was killed while it waited is not executed.
    let mut killed = UnixStream::connect(bed.dir.path().join("agent.sock")).unwrap();
    let call = transport::encode(&bed.invocation(Command::Add, "killed", "p")).unwrap();
    killed.write_all(&call).unwrap();
    drop(killed);
    // Time for the others to overtake, which they must not.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    drop(open);
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(container().await, "new");
    assert_eq!(bed.os.lock().connected[&endpoint_id("p")], "new");

    let failure = bed.call(old).await.unwrap_err();
    assert_eq!(failure.code, Code::INVALID_ENVIRONMENT, "{failure}");
    assert!(failure.to_string().contains("new"), "{failure}");
    assert_eq!(container().await, "new");
    bed.call(bed.invocation(Command::Del, "old", "p")).await.unwrap();
    assert_eq!(container().await, "new", "what is left of the old one is not the new one's");
    let key = endpoint_key("p", "eth0");
    assert_ne!(bed.store.get(&key).await.unwrap().map(|stored| stored.value), None::<Value>);
    let handles: Vec<String> = bed
        .store
        .list(Kind::IpamHandle)
        .await
        .unwrap()
        .items
        .into_iter()
        .map(|stored| stored.key.name)
        .collect();
    assert_eq!(handles, ["net.new"]);
}

/// The link is made while the pod is read. If nobody knows the pod, or it gets no address, the link must not come after the
/// ADD has been undone.
#[tokio::test(flavor = "multi_thread")]
async fn an_add_without_a_pod_or_an_address_leaves_no_link() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    bed.store.delete(&Key::global(Kind::IpPool, "default"), None).await.unwrap();
    let calls = [("c1", "p", Code::IPAM), ("c2", "unknown", Code::TRY_AGAIN_LATER)];
    for (number, (container, pod, expected)) in calls.into_iter().enumerate() {
        let open = bed.os.delay_link(container);
        let socket = bed.dir.path().join("agent.sock");
        let add = bed.invocation(Command::Add, container, pod);
        let add = tokio::task::spawn_blocking(move || send(&socket, &add));
        // Time for reading to fail, which alone must not end the ADD.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        drop(open);
        let failure = add.await.unwrap().unwrap_err();
        assert_eq!(failure.code, expected, "{failure}");
        assert_eq!(bed.os.lock().abandoned, number + 1, "the next attempt needs its name in the pod");
        // A link that comes too late would be seen here.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        assert!(bed.os.lock().connected.is_empty(), "{:?}", bed.os.lock().connected);
    }
}

/// The endpoint may be stored by the time the connection fails: with the address if the node's block is known, otherwise while
/// the pod is being connected.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_stays_of_a_pod_that_cannot_be_connected() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let has_address = async || !bed.store.list(Kind::IpamHandle).await.unwrap().items.is_empty();
    let has_endpoint = async || bed.endpoint("p", "eth0").await.is_some();
    let nothing_stays = async |container: &str| {
        assert!(!has_address().await && !has_endpoint().await, "{container}");
        assert!(bed.os.lock().connected.is_empty(), "{container}");
    };

    bed.os.lock().without_link.insert("no-link".to_owned());
    assert_eq!(code(bed.call(bed.invocation(Command::Add, "no-link", "p")).await), Code::WIRING);
    nothing_stays("no-link").await;

    for container in ["first", "later"] {
        bed.os.lock().without_connection.insert(container.to_owned());
        let connect = bed.os.hold(container);
        let fail_late = async {
            let stored = || async { has_endpoint().await };
            until("the endpoint is stored while the pod is being connected", stored).await;
            drop(connect);
        };
        let (added, ()) = tokio::join!(bed.call(bed.invocation(Command::Add, container, "p")), fail_late);
        assert_eq!(code(added), Code::WIRING);
        nothing_stays(container).await;
    }
    bed.call(bed.invocation(Command::Add, "good", "p")).await.unwrap();
    assert!(has_address().await && has_endpoint().await);
}

/// A pod's link gets the address that the agent chooses while the choice is written. Somebody else may have taken it by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_link_with_an_address_that_the_pod_does_not_get_is_made_anew() {
    let bed = Bed::new().await;
    let of_others = Ipam::new(bed.store.clone(), NODE, BTreeMap::new());
    let take_next = async |handle: &str| {
        let request = Request { handle: handle.to_owned(), ..Request::default() };
        of_others.assign(&request).await.unwrap().address
    };
    let add =
        |number: u32| bed.call(bed.invocation(Command::Add, &format!("c{number}"), &format!("p{number}")));
    for number in 1..=3 {
        bed.pod(&format!("p{number}"), "u", json!({})).await;
    }
    add(1).await.unwrap();
    assert_eq!(bed.os.lock().abandoned, 0);

    let taken = take_next("other-1").await;
    let added = add(2).await.unwrap().unwrap();
    let given: IpAddr = added.ips[0].address.split('/').next().unwrap().parse().unwrap();
    assert_ne!(given, taken);
    assert_eq!(bed.os.lock().abandoned, 1, "the link had the address {taken}");
    assert_eq!(bed.os.lock().addresses[&endpoint_id("p2")], [given]);
    assert_eq!(bed.os.lock().connected[&endpoint_id("p2")], "c2");
    let endpoint = bed.endpoint("p2", "eth0").await.unwrap();
    assert_eq!(endpoint["spec"]["ipNetworks"], json!([format!("{given}/32")]));

    // Nobody gives it another one.
    take_next("other-2").await;
    bed.store.delete(&Key::global(Kind::IpPool, "default"), None).await.unwrap();
    assert_eq!(code(add(3).await), Code::IPAM);
    assert_eq!(bed.os.lock().abandoned, 2);
    assert!(!bed.os.lock().connected.contains_key(&endpoint_id("p3")));
    assert!(bed.endpoint("p3", "eth0").await.is_none());
    assert_eq!(bed.store.list(Kind::IpamHandle).await.unwrap().items.len(), 4);
}

/// A pod's endpoint is stored by the write that gives it its address, and is the same as one that is stored afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_is_published_with_the_address() {
    let bed = Bed::new().await;
    // Somebody writes all the time: between two writes of ADD there would be another one.
    let (store, key) = (bed.store.clone(), Key::global(Kind::Namespace, "busy"));
    let writer = tokio::spawn(async move {
        loop {
            store.create(&key, json!({"metadata": {"name": "busy"}})).await.unwrap();
            store.delete(&key, None).await.unwrap();
        }
    });
    let mut endpoints = Vec::new();
    for number in 0..10 {
        let (container, pod) = (format!("c{number}"), format!("p{number}"));
        bed.pod(&pod, "u", json!({"app": "a"})).await;
        bed.call(bed.invocation(Command::Add, &container, &pod)).await.unwrap();
        let endpoint = bed.store.get(&endpoint_key(&pod, "eth0")).await.unwrap().unwrap();
        let blocks = bed.store.list(Kind::IpamBlock).await.unwrap();
        endpoints.push((endpoint, blocks.items[0].position.0));
    }
    writer.abort();
    // The first ADD also claims the block.
    for (number, (endpoint, block)) in endpoints.iter().enumerate().skip(1) {
        assert_eq!(endpoint.position.0, block + 1, "{number}: {endpoint:?}");
    }
    let [(first, _), (second, _), ..] = &endpoints[..] else { panic!("{endpoints:?}") };
    let common = |endpoint: &Value| {
        let mut value = endpoint.clone();
        let is_set = |it: Value| it != json!("") && it != json!([]);
        for of_pod in ["interfaceName", "mac", "ipNetworks", "containerID", "pod"] {
            let removed = value["spec"].as_object_mut().unwrap().remove(of_pod);
            assert!(removed.is_some_and(is_set), "{of_pod}: {endpoint}");
        }
        value["metadata"]["name"].take();
        value
    };
    assert_eq!(common(&first.value), common(&second.value));
}

/// Its sandbox is abandoned; the next one must not wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_add_is_undone() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    bed.os.lock().report = Report {
        endpoints: [(endpoint_id("p"), vec![condition(Reason::InterfaceMissing)])].into(),
        retry: true,
        ..Report::default()
    };
    let mut killed = UnixStream::connect(bed.dir.path().join("agent.sock")).unwrap();
    killed.write_all(&transport::encode(&bed.invocation(Command::Add, "killed", "p")).unwrap()).unwrap();
    until("the endpoint is published", || async { bed.endpoint("p", "eth0").await.is_some() }).await;
    drop(killed);
    until("it is undone", || async {
        bed.endpoint("p", "eth0").await.is_none()
            && bed.os.lock().connected.is_empty()
            && bed.store.list(Kind::IpamHandle).await.unwrap().items.is_empty()
    })
    .await;
    bed.os.lock().report = Report::default();
    bed.call(bed.invocation(Command::Add, "next", "p")).await.unwrap();
}
