//! The backends of Services, by single cases.

use serde_json::json;
use tortie_api::{Key, Kind};
use tortie_calc::Calc;

/// As in kube-proxy: those that terminate get connections only if no other is there.
#[test]
fn backends_that_terminate_stand_in_for_ready_ones() {
    let ready = |address: &str| json!({"addresses": [address], "conditions": {"ready": true}});
    let terminates = |address: &str, serving: bool| {
        let conditions = json!({"ready": false, "serving": serving, "terminating": true});
        json!({"addresses": [address], "conditions": conditions})
    };
    let starts = |address: &str| json!({"addresses": [address], "conditions": {"ready": false}});
    for (slices, expected) in [
        (vec![json!([ready("10.0.0.1"), terminates("10.0.0.2", true)])], &["10.0.0.1"][..]),
        (vec![json!([terminates("10.0.0.2", true)]), json!([ready("10.0.0.1")])], &["10.0.0.1"]),
        (vec![json!([starts("10.0.0.1"), terminates("10.0.0.2", true)])], &["10.0.0.2"]),
        (vec![json!([terminates("10.0.0.1", false), terminates("10.0.0.2", true)])], &["10.0.0.2"]),
        (vec![json!([starts("10.0.0.1"), terminates("10.0.0.2", false)])], &[]),
    ] {
        let mut calc = Calc::new("n").with_services();
        let metadata = json!({"name": "s", "namespace": "ns"});
        let spec = json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]});
        let service = json!({"metadata": metadata, "spec": spec});
        calc.update(&Key::namespaced(Kind::Service, "ns", "s"), Some(&service));
        for (number, endpoints) in slices.iter().enumerate() {
            let name = format!("s-{number}");
            let labels = json!({"kubernetes.io/service-name": "s"});
            let metadata = json!({"name": name, "namespace": "ns", "labels": labels});
            let ports = json!([{"port": 8080}]);
            let slice =
                json!({"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints, "ports": ports});
            calc.update(&Key::namespaced(Kind::EndpointSlice, "ns", name), Some(&slice));
        }
        calc.flush();
        let service = calc.state().services.values().next().unwrap();
        let backends = service.ports[0].backends.iter().map(|(address, _)| address.to_string());
        assert_eq!(backends.collect::<Vec<_>>(), expected, "{slices:?}");
    }
}
