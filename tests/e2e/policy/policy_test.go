// Package policy is the conformance suite of ClusterNetworkPolicy, as a test binary.
//
//	KUBECONFIG=… policy.test -test.v
package policy

import (
	"testing"

	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"
	"sigs.k8s.io/network-policy-api/conformance/tests"
	"sigs.k8s.io/network-policy-api/conformance/utils/flags"
	"sigs.k8s.io/network-policy-api/conformance/utils/suite"
)

func TestConformance(t *testing.T) {
	configuration, err := config.GetConfig()
	if err != nil {
		t.Fatalf("reading the kubeconfig: %v", err)
	}
	controllerClient, err := client.New(configuration, client.Options{})
	if err != nil {
		t.Fatalf("creating a client: %v", err)
	}
	clientset, err := kubernetes.NewForConfig(configuration)
	if err != nil {
		t.Fatalf("creating a client: %v", err)
	}
	if err := api.Install(controllerClient.Scheme()); err != nil {
		t.Fatalf("registering the types: %v", err)
	}
	conformance := suite.New(suite.Options{
		Client:                     controllerClient,
		ClientSet:                  clientset,
		KubeConfig:                 *configuration,
		Debug:                      *flags.ShowDebug,
		CleanupBaseResources:       *flags.CleanupBaseResources,
		SupportedFeatures:          suite.ParseSupportedFeatures(*flags.SupportedFeatures),
		ExemptFeatures:             suite.ParseSupportedFeatures(*flags.ExemptFeatures),
		EnableAllSupportedFeatures: *flags.EnableAllSupportedFeatures,
	})
	conformance.Setup(t)
	conformance.Run(t, tests.ConformanceTests)
}
