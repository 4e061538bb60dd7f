// Made of static/js by `make static`: change that instead.
function o(t){let e=!1;return()=>{e||(e=!0,requestAnimationFrame(()=>{e=!1,t()}))}}function f(t,e){let r=-1/0,n=0,a=o(()=>{n=0,r=performance.now(),e()});return()=>{n||=setTimeout(a,Math.max(0,r+t-performance.now()))}}export{o as a,f as b};
