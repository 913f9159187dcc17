// Command kubernetes is the five programs of a Kubernetes node in one binary, so that they are
// compiled and linked once: the name it is called by, or else its first argument, says which one
// to be. The command constructors are upstream's own; nothing of them is changed here.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // time zones of CronJobs, as upstream's binaries have them

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"

	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	name := filepath.Base(os.Args[0])
	newCommand, found := programs[name]
	if !found && len(os.Args) > 1 {
		name = os.Args[1]
		newCommand, found = programs[name]
		os.Args = os.Args[1:]
	}
	if !found {
		fmt.Fprintf(os.Stderr, "%s: no such program; there are kube-apiserver, kube-controller-manager, "+
			"kube-proxy, kube-scheduler and kubelet\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(newCommand()))
}
