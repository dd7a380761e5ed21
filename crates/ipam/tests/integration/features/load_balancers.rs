//! Addresses of Services, whose blocks belong to no node.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_ipam::{
    Fix, Ipam, IpamError, Problem, Records, Request, Use, check, service_handle, service_owner,
};
use tortie_store::{Embedded, Store};

use crate::features::check::snapshot;
use crate::features::support::{allocated, block, cluster, configure, linux, names, put, put_pool, request};

/// The pool of the cluster is for this use from now on. `apply` would refuse the change, because addresses are in use.
async fn use_pool_for(store: &Embedded, intended_use: &str) {
    put_pool(store, "p", json!({"cidr": "10.9.0.0/28", "blockSize": 29, "allowedUses": [intended_use]}))
        .await;
}

async fn two_blocks(strict: bool) -> Arc<Embedded> {
    let store = cluster(&[]).await;
    use_pool_for(&store, "LoadBalancer").await;
    configure(&store, json!({"strict_affinity": strict, "auto_allocate_blocks": true, "maxBlocksPerHost": u8::from(strict)})).await;
    store
}

fn of_service(number: u32) -> Request {
    let name = format!("s{number}");
    Request {
        owner: service_owner("n", &name, "2026-05-01 10:00:00 +0000 UTC".to_owned()),
        intended_use: Use::LoadBalancer,
        ..request(&service_handle("n", &name, "u"))
    }
}

async fn put_service(store: &Embedded, name: &str, kind: &str) {
    let value = json!({"metadata": {"name": name, "namespace": "n", "uid": "u"}, "spec": {"type": kind}});
    put(store, &Key::namespaced(Kind::Service, "n", name), value).await;
}

#[tokio::test]
async fn nodes_and_load_balancers_never_use_each_others_blocks() {
    for strict in [true, false] {
        let store = two_blocks(strict).await;
        use_pool_for(&store, "Workload").await;
        let of_pod = linux(&store, "a").assign(&request("pod")).await.unwrap();
        use_pool_for(&store, "LoadBalancer").await;
        let services = Ipam::of_load_balancers(store.clone());
        let of_service_1 = services.assign(&of_service(1)).await.unwrap();
        assert_ne!(of_pod.block, of_service_1.block);
        let owner = block(&store, &of_service_1.block.to_string()).await.unwrap().affinity;
        assert_eq!(owner.as_deref(), Some("virtual:load-balancer"));
        let affinity = format!("virtual:load-balancer/{}", of_service_1.block);
        assert!(names(&store, Kind::BlockAffinity).await.contains(&affinity));
        for number in 2..=8 {
            assert_eq!(services.assign(&of_service(number)).await.unwrap().block, of_service_1.block);
        }
        let error = services.assign(&of_service(9)).await.unwrap_err();
        assert!(error.to_string().starts_with("no free address for load balancers"), "{error}");
        // Neither by a request for one address, nor by taking over an empty block.
        let free_of_node = of_pod.block.hosts().find(|address| *address != of_pod.address).unwrap();
        let error = services.assign_address(&of_service(9), free_of_node).await.unwrap_err();
        assert!(matches!(error, IpamError::OfAnother { .. }), "{error}");
        for number in 1..=8 {
            services.release(&of_service(number).handle).await.unwrap();
        }
        use_pool_for(&store, "Workload").await;
        let node = linux(&store, "a");
        let error = node.assign_address(&request("fixed"), of_service_1.address).await.unwrap_err();
        assert!(matches!(error, IpamError::OfAnother { .. }), "{error}");
        for number in 0..7 {
            node.assign(&request(&format!("pod.{number}"))).await.unwrap();
        }
        assert!(matches!(node.assign(&request("more")).await, Err(IpamError::Exhausted { .. })));
        assert_eq!(allocated(&store).await.len(), 8);
    }
}

/// `maxBlocksPerHost` is for hosts.
#[tokio::test]
async fn load_balancers_have_as_many_blocks_as_they_need() {
    let store = cluster(&[]).await;
    let spec = json!({"cidr": "10.9.0.0/24", "blockSize": 32, "allowedUses": ["LoadBalancer"]});
    put_pool(&store, "p", spec).await;
    configure(&store, json!({"strict_affinity": true, "auto_allocate_blocks": true, "maxBlocksPerHost": 1}))
        .await;
    let services = Ipam::of_load_balancers(store.clone());
    for number in 0..30 {
        services.assign(&of_service(number)).await.unwrap();
    }
    assert_eq!(allocated(&store).await.len(), 30);
}

#[tokio::test]
async fn a_check_finds_addresses_of_services_that_do_not_exist() {
    let store = two_blocks(true).await;
    put(&store, &Key::global(Kind::Node, "a"), json!({"metadata": {"name": "a"}})).await;
    let services = Ipam::of_load_balancers(store.clone());
    for number in 1..=3 {
        services.assign(&of_service(number)).await.unwrap();
    }
    let findings = async || check(&snapshot(&store).await, Timestamp::now(), 0);
    assert_eq!(findings().await, [], "a datastore without Services says nothing about them");
    put_service(&store, "s1", "LoadBalancer").await;
    put_service(&store, "s2", "ClusterIP").await;
    let found = findings().await;
    let about: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), 2, "{about:?}");
    assert!(found.iter().all(|finding| finding.kind == Problem::Leak), "{about:?}");
    assert!(about[0].contains("Service n/s") && about[0].contains("does not exist"), "{about:?}");
    for finding in found {
        let Some(fix @ Fix::Release(..)) = &finding.fix else { panic!("{finding}") };
        Records::new(store.clone()).repair(fix).await.unwrap();
    }
    assert_eq!(findings().await, []);
    assert_eq!(allocated(&store).await.into_values().collect::<Vec<_>>(), [of_service(1).handle]);

    // The affinity is lost.
    let name = names(&store, Kind::BlockAffinity).await.remove(0);
    store.delete(&Key::global(Kind::BlockAffinity, name), None).await.unwrap();
    let found = findings().await;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].kind, found[0].fix.is_some()), (Problem::Block, false), "{}", found[0]);
    assert!(found[0].why.contains("virtual:load-balancer"), "{}", found[0]);
}

/// Whoever has seen an address before it was renewed cannot release it any more.
#[tokio::test]
async fn a_renewed_address_is_not_released_by_who_saw_it_before() {
    let store = two_blocks(true).await;
    let services = Ipam::of_load_balancers(store.clone());
    let given = services.assign(&of_service(1)).await.unwrap();
    let seen = services.releases(&of_service(1).handle).await.unwrap();
    assert!(services.renew(&of_service(1).handle, given).await.unwrap());
    let records = Records::new(store.clone());
    let (block_of, release) = seen[0].clone();
    let error = records.release_addresses(block_of, std::slice::from_ref(&release)).await.unwrap_err();
    assert!(matches!(error, IpamError::Changed { .. }), "{error}");
    let (block_of, release) = services.releases(&of_service(1).handle).await.unwrap().remove(0);
    assert_eq!(records.release_addresses(block_of, &[release]).await.unwrap(), [given.address]);
    assert!(!services.renew(&of_service(1).handle, given).await.unwrap(), "it is free");
}
