//! Stored and unsupported objects are rejected or reported, never ignored.

use crate::common::{Bed, pod_key, put, until};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_cni::{Code, Command};

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_annotations_fail_the_add() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    let annotated = |name: &str, annotation: &str| {
        json!({"metadata": {"name": name, "namespace": "n", "uid": "u", "annotations": {(annotation): "[]"}},
            "spec": {"nodeName": crate::common::NODE, "containers": [{"name": "c"}]}})
    };
    let namespace = Key::global(Kind::Namespace, "n");
    let mac = "cni.projectcalico.org/hwAddr";
    for (key, value, named) in [
        (pod_key("p"), annotated("p", "cni.projectcalico.org/ipAddrs"), "Pod n/p has the annotation cni"),
        (pod_key("p"), annotated("p", "projectcalico.org/other"), ""),
        (
            namespace.clone(),
            json!({"metadata": {"name": "n", "annotations": {(mac): "[]"}}}),
            "Namespace n has",
        ),
        (namespace.clone(), json!({"metadata": {"name": "n"}}), ""),
    ] {
        put(&*bed.store, &key, value).await;
        let answer = bed.call(bed.invocation(Command::Add, "c1", "p")).await;
        match named {
            "" => drop(answer.unwrap()),
            _ => {
                let failure = answer.expect_err(named);
                assert_eq!(failure.code, Code::NOT_SUPPORTED);
                assert!(failure.msg.contains(named), "{failure:?}");
            }
        }
    }
    bed.store.delete(&namespace, None).await.unwrap();
    let failure = bed.call(bed.invocation(Command::Add, "c2", "p")).await.unwrap_err();
    assert_eq!(failure.code, Code::TRY_AGAIN_LATER);
    assert!(failure.msg.contains("Namespace n does not exist"), "{failure:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_settings_of_ipam_fail_the_add() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    for (ipam, named) in [
        (json!({"type": "calico-ipam", "assign_ipv4": "true", "assign_ipv6": "false"}), ""),
        (json!({"type": "calico-ipam", "assign_ipv6": "yes"}), "ipam.assign_ipv6"),
        (json!({"assign_ipv4": false, "assign_ipv6": "false"}), "ipam.assign_ipv4 and ipam.assign_ipv6"),
        // The test's operating system has no IPv6.
        (json!({"assign_ipv4": false}), "requests an IPv6 address"),
        (json!({"type": "calico-ipam", "assign_ipv6": "true"}), "requests an IPv6 address"),
        (json!({"ranges": []}), "ipam.ranges"),
        (json!({"type": "tortie", "ipv4_pools": ["default"], "ipv6_pools": []}), ""),
        (json!({"ipv6_pools": ["six"]}), ""),
    ] {
        let mut call = bed.invocation(Command::Add, "c1", "p");
        call.config.extra.insert("ipam".to_owned(), ipam.clone());
        let answer = bed.call(call).await;
        match named {
            "" => drop(answer.unwrap()),
            _ => {
                let failure = answer.expect_err(named);
                assert_eq!(failure.code, Code::NOT_SUPPORTED, "{ipam}");
                assert!(failure.msg.contains(named), "{failure:?}");
            }
        }
    }
}

/// They are features that Calico has, and enables only if the configuration says so.
#[tokio::test(flavor = "multi_thread")]
async fn features_that_are_off_fail_the_add() {
    let bed = Bed::new().await;
    bed.pod("p", "u", json!({})).await;
    for (features, fails) in [
        (json!({"floating_ips": false}), false),
        (json!({"ip_addrs_no_ipam": true}), false),
        (json!({"ip_addrs_no_ipam": "true"}), true),
        (json!({"floating_ips": true}), true),
    ] {
        let mut call = bed.invocation(Command::Add, "c1", "p");
        call.config.extra.insert("feature_control".to_owned(), features.clone());
        let answer = bed.call(call).await;
        assert_eq!(answer.is_err(), fails, "{features}");
        if let Err(failure) = answer {
            assert_eq!(failure.code, Code::NOT_SUPPORTED);
            assert!(failure.msg.contains("feature_control."), "{failure:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_without_effect_are_reported_and_block_nothing() {
    let bed = Bed::new().await;
    let key = Key::global(Kind::FelixConfiguration, "default");
    let stored =
        put(&*bed.store, &key, json!({"metadata": {"name": "default"}, "spec": {"wireguardEnabled": true}}));
    let position = stored.await.position;
    until("the report passes it", || async { bed.reported(key.kind, position).await >= Some(position) })
        .await;
    let conditions: Vec<Value> = bed.report().await["conditions"].as_array().unwrap().clone();
    let [condition] = conditions.as_slice() else { panic!("{conditions:?}") };
    assert_eq!(condition["object"], json!({"kind": "FelixConfiguration", "name": "default"}));
    assert_eq!(condition["reason"], "FieldNotSupported");
    assert!(condition["message"].as_str().unwrap().contains("spec.wireguardEnabled"), "{condition}");
}
