// Everything, in the order in which it is seen.
showSteps();
showFrontier();
showTimeline();
showMemory();
showTables();
showArguments();
document.documentElement.dataset.ready = "yes";
